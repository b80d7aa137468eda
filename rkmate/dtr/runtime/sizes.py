"""How many bytes an operation will allocate, and how long it takes.

On a device that works while the host continues, the host's clock says how long the call took, not the
operation; to wait for the device at each operation would leave it idle. So the time is that of the bytes and
the arithmetic at the rates of a GPU. Eviction compares times with each other: their ratios matter.
"""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from rkmate import device as devices
from rkmate.device import Device, MeterError
from rkmate.devices import Rates
from rkmate.dtr.runtime.schema import map_tensors
from rkmate.torch_seam.schema import OpOverload, flop_formula
from rkmate.torch_seam.tensors import storage_id

# -- Times -----------------------------------------------------------------------------------------

_RATES = Rates(2e12, 5e13, MappingProxyType({}), 4e-6)
"""Rates of a typical GPU."""


def expected_nanoseconds(function: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the greater of arithmetic and memory traffic, plus a call."""
    moved: list[int] = []
    map_tensors([*args, *kwargs.values(), result], lambda t: moved.append(t.numel() * t.element_size()))
    count = flop_formula(function)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
    return int(1e9 * _RATES.seconds(flops / _RATES.flops_per_second, sum(moved)))


# -- Bytes -----------------------------------------------------------------------------------------

class Need(NamedTuple):
    """Memory that an operation allocates."""

    outputs: int
    """Bytes of its fresh results."""
    extra: int
    """Bytes of temporary memory, on top of the results, at the worst moment."""
    measured: bool
    """Seen on a run of the same operation on the same shapes, not estimated."""
    nanoseconds: int
    """Least time that a run took so far; 0 before the first."""
    expected: bool = False
    """The time is what a device is expected to take: the host's clock says nothing about it."""


class Ran(NamedTuple):
    """A call that has run."""

    result: Any
    extra: int
    """Bytes of temporary memory."""
    measured: bool
    """Whether the bytes were measured, in this call or an earlier one."""
    nanoseconds: int
    """Time of the call."""
    cost: int
    """Expected nanoseconds of a repetition."""


_LEARNED = 50_000
"""Signatures that are kept at most; then the older half is dropped."""
_SHAPES_ONLY = torch.device("meta")
_SMALL = 64
"""Scalars that an operation turns into tensors on the way."""


class Sizes:
    """Learns each signature's need at its first call; knows it afterwards.

    Before the first call, the results' sizes come from a run on the ``meta`` device, which computes
    shapes only. Temporary memory is measured during the first call: on the CPU unless a profiler is
    running, which the measurement would disturb; on a device by what its allocator counts, without
    waiting for it or resetting a peak. Else it is estimated as the bytes of all inputs and outputs. Times
    on a device are expected ones.
    """

    _known: ClassVar[dict[Any, Need]] = {}

    def need(self, key: Any, function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Need:
        """Return what the call will allocate. `key`: everything that this depends on, including the device.

        Raises `ArgumentError` for tensors on a device without an implementation.
        """
        known = self._known.get(key)
        if known is not None:
            return known
        _device(args, kwargs)
        return _estimate(function, args, kwargs)

    def run(
        self, key: Any, need: Need, function: OpOverload, args: Any, kwargs: dict[str, Any]
    ) -> Ran:
        """Call the function, and learn from the call."""
        # A shape that depends on values is not learned: its estimate stays.
        host = None
        if not need.measured:
            device = _device(args, kwargs)
            if device is not None and not device.host:
                return self._run_on(device, key, need, function, args, kwargs)
            if torch.Tag.dynamic_output_shape not in function.tags:
                host = device
        if need.expected:
            began = time.perf_counter_ns()
            result = function(*args, **kwargs)
            return Ran(result, need.extra, True, time.perf_counter_ns() - began, need.nanoseconds)
        if host is None:
            began = time.perf_counter_ns()
            result = function(*args, **kwargs)
            spent = time.perf_counter_ns() - began
            if need.measured and not 0 < need.nanoseconds <= spent:
                self._known[key] = need._replace(nanoseconds=spent)
            # The least time seen is the operation's; more is the machine's.
            cost = min(spent, need.nanoseconds) if need.nanoseconds else spent
            return Ran(result, need.extra, need.measured, spent, cost)
        began = time.perf_counter_ns()
        try:
            seen = host.measure_peak(lambda: function(*args, **kwargs))
        except MeterError:
            result = function(*args, **kwargs)
            spent = time.perf_counter_ns() - began
            return Ran(result, need.extra, False, spent, spent)
        extra = max(0, seen.peak - max(0, seen.net))
        self._learn(key, Need(max(0, seen.net), extra, True, 0))
        spent = int(seen.seconds * 1e9)
        return Ran(seen.result, extra, True, spent, spent)

    def _run_on(
        self, device: Device, key: Any, need: Need, function: OpOverload, args: Any, kwargs: dict[str, Any]
    ) -> Ran:
        """Run the first call on a device that works while the host continues. The device's allocator counts
        on the host."""
        statistics = device.statistics
        before = None if statistics is None else statistics.handed_out()
        began = time.perf_counter_ns()
        result = function(*args, **kwargs)
        spent = time.perf_counter_ns() - began
        expected = expected_nanoseconds(function, args, kwargs, result)
        after = None if statistics is None else statistics.handed_out()
        if before is None or after is None or torch.Tag.dynamic_output_shape in function.tags:
            return Ran(result, need.extra, False, spent, expected)
        net = after[0] - before[0]
        if not 0 <= net <= need.outputs + _SMALL:
            # A library took memory at its first call, and keeps it; or another thread was here.
            return Ran(result, need.extra, False, spent, expected)
        # All that the call was handed, as if it had kept it to the end: no less than its peak.
        extra = max(0, after[1] - before[1] - net)
        self._learn(key, Need(net, extra, True, expected, True))
        return Ran(result, extra, True, spent, expected)

    def _learn(self, key: Any, need: Need) -> None:
        if len(self._known) >= _LEARNED:
            # The oldest half goes: a program whose shapes never repeat must not fill memory.
            for old in list(self._known)[: _LEARNED // 2]:
                del self._known[old]
        self._known[key] = need


def _device(args: Any, kwargs: dict[str, Any]) -> Device | None:
    """Return the device that a call computes on: the CPU if no other device is involved, else the one other
    device that its tensors are on. None for several devices, and if nothing computes."""
    places: set[torch.device] = set()
    map_tensors([*args, *kwargs.values()], lambda t: places.add(t.device))
    device = kwargs.get("device")
    if device is not None:
        places.add(torch.device(device))
    found = [devices.of(p) for p in places if p != _SHAPES_ONLY]
    if len(found) < len(places):
        return None
    away = {id(d): d for d in found if not d.host}
    return devices.of("cpu") if not away else next(iter(away.values())) if len(away) == 1 else None


def _estimate(function: OpOverload, args: Any, kwargs: dict[str, Any]) -> Need:
    inputs: list[int] = [0]
    map_tensors([*args, *kwargs.values()], lambda t: inputs.append(t.numel() * t.element_size()))
    stand_ins: list[torch.Tensor] = []

    def shape_only(tensor: torch.Tensor) -> torch.Tensor:
        stand_in = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        stand_ins.append(stand_in)
        return stand_in

    try:
        options = {name: map_tensors(value, shape_only) for name, value in kwargs.items()}
        if options.get("device") is not None or not inputs[1:]:
            options["device"] = torch.device("meta")
        options.pop("generator", None)
        made = function(*map_tensors(args, shape_only), **options)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # Results whose shape depends on values, or no rule for shapes: an upper bound in practice
        # is what came in, with an index of 8 bytes per element.
        return Need(sum(inputs) * 2, sum(inputs), False, 0)
    fresh: dict[int, int] = {}
    given = {storage_id(stand_in) for stand_in in stand_ins}

    def count(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in given:
            fresh[storage_id(storage)] = storage.nbytes()

    map_tensors(made, count)
    outputs = sum(fresh.values())
    if torch.Tag.pointwise in function.tags:
        return Need(outputs, _SMALL, False, 0)
    return Need(outputs, sum(inputs) + outputs, False, 0)
