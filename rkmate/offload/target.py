"""The target that data may be sent to while a step computes: the user's choice, and its measured speed, both
ways at once, while the device computes.

A measurement uses an engine like the one of the step (without checksums, which a step may or may not have).
It copies a few hundred million bytes, takes two or three seconds, and is remembered.

The time that copies take from a computation on the same processor is measured by the clock of the process,
which other programs do not affect, while nothing is computed: with a thread on each core, all threads wait
for the one that a copy has interrupted. If cores are free, a computation that runs during the copies shows
the real, smaller loss.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from rkmate import device as devices
from rkmate.budget import parse_budget
from rkmate.device import Device
from rkmate.devices import DISK_BYTES_PER_SECOND, DISK_SECONDS_PER_COPY
from rkmate.errors import ArgumentError
from rkmate.ir.link import Link
from rkmate.offload.protocol import CopyEngine
from rkmate.support.cache import cache_folder, read_json, store_json
from rkmate.support.processes import cores

# -- The user's choice -----------------------------------------------------------------------------

HOST = "host"
"""The place that is the host's own memory."""
LEAST_BYTES = 4096
"""Smallest limit of bytes that may be away: less means that a unit was forgotten."""


@dataclass(frozen=True, init=False)
class Offload:
    """A target to which a step may send data, with a limit."""

    place: str
    """``"host"``: the host's memory, for a model on an accelerator; otherwise the absolute path of a folder
    on a disk, for a model on the CPU."""
    most_bytes: int | None
    """Bytes that may be away at once, over all calls of a module (with `apply`, over all its layers) that
    wait for their backward; None: limited by the free space."""
    verify: bool
    """Whether every step compares checksums of the data that comes back, which takes time."""

    def __init__(self, place: str | os.PathLike[str], most_bytes: int | str | None = None,
                 verify: bool = False) -> None:
        """Describe a target.

        `place`: ``"host"``, or a folder; the path may be relative, or begin with ``~``. `most_bytes`: bytes,
        or text such as ``"20GiB"``. Raises `ArgumentError` if either is invalid.
        """
        if not isinstance(place, (str, os.PathLike)) or not (text := str(os.fspath(place))):
            raise ArgumentError(f'offload is {place!r}; it should be a folder on a disk, or "host"')
        if not isinstance(verify, bool):
            raise ArgumentError(f"verify is {verify!r}; it should be True or False")
        path = text if text == HOST else os.path.abspath(os.path.expanduser(text))
        for name, value in (("place", path), ("verify", verify),
                            ("most_bytes", None if most_bytes is None else _bytes(most_bytes))):
            object.__setattr__(self, name, value)

    def part(self, share: int, whole: int) -> Offload:
        """Return the target with a share of its limit, for one of several users of that limit."""
        if self.most_bytes is None or share == whole:
            return self
        found = copy.copy(self)
        object.__setattr__(found, "most_bytes", self.most_bytes * share // whole)
        return found

    def check_folder(self) -> None:
        """Raise `ArgumentError` if the folder does not exist or is not writable."""
        if self.place == HOST:
            return
        if not os.path.isdir(self.place):
            raise ArgumentError(f"offload is {self.place!r}; there is no such folder")
        if not os.access(self.place, os.W_OK | os.X_OK):
            raise ArgumentError(f"offload is {self.place!r}; the folder cannot be written to")

    def check(self, device: Device) -> None:
        """Raise `ArgumentError` if the device cannot send data to this target."""
        if device.elsewhere is None:
            self.check_folder()
            self.engine(device).close()
        elif self.place != HOST:
            raise ArgumentError(f"offload is {self.place!r}, and from a GPU data is sent to the host's "
                                'memory: offload="host"')

    def engine(self, device: Device) -> CopyEngine:
        """Return the engine that copies data from a device to this target and back. Raises `ArgumentError` if
        none can."""
        return device.copy_engine(self.place, self.most_bytes, verify=self.verify)

    def buffer_bytes(self, device: Device) -> int:
        """Return bytes of the device that copying takes in each call that waits for its backward."""
        with closing(self.engine(device)) as engine:
            return engine.buffer_bytes


Place = str | os.PathLike[str] | Offload
"""Target as users write it."""


def offload_of(place: Any, most: Any, before: Offload | None = None) -> Offload | None:
    """Return the target that a user gave as `offload` and `offload_bytes`. `before`: the value for an
    argument that is left out. Raises `ArgumentError` if a value is invalid."""
    found = before if place is None else place if isinstance(place, Offload) else Offload(place)
    if most is None:
        return found
    if found is None:
        raise ArgumentError(f"offload_bytes is {most!r}, and offload does not say where to: give a "
                            'folder, or "host"')
    return replace(found, most_bytes=most)


def _bytes(most: Any) -> int:
    try:
        found = parse_budget(most).bytes
    except ArgumentError:
        found = None
    if found is None or found < LEAST_BYTES:
        unit = "" if found is None else f", {found:,} bytes, which is less than any tensor worth sending"
        raise ArgumentError(f"most_bytes is {most!r}{unit}; it should be bytes (an int), or text such as "
                            '"20GiB"')
    return found


def link_of(offload: Offload | None, device: Device, costs: str, calls: int = 1) -> Link | None:
    """Return the link from a device to the target of its data, for each of `calls` calls of a step. None if
    no data may be sent, or if the limit is too small to be useful. The link is measured if `costs` are, and
    estimated otherwise. Raises `ArgumentError`, and `OffloadError` if the target fails."""
    if offload is None:
        return None
    most = offload.part(1, calls).most_bytes
    if most is not None and most < LEAST_BYTES:
        return None
    if costs != "measured":
        buffers = 0 if device.elsewhere is not None else offload.buffer_bytes(device)
        link = stated_link(offload, device, buffers)
    else:
        with closing(offload.engine(device)) as engine:
            link = measure_link(device, engine, cache_folder())
    return replace(link, most_bytes=most)


# -- Engines ---------------------------------------------------------------------------------------
#
# What copies data away for all plans of a module, or of modules that share a budget.


class Engines:
    """The engines of all devices: each is made when it is first needed, and closed when nothing refers to
    this object any more. All calls of an engine together keep to the limit of bytes that may be away."""

    def __init__(self, offload: Offload | None) -> None:
        self.offload = offload
        self._lock = threading.Lock()
        self._made: dict[torch.device, CopyEngine] = {}

    def __reduce__(self) -> Any:
        """Give a copy engines of its own."""
        return Engines, (self.offload,)

    def of(self, device: torch.device) -> CopyEngine:
        """Return the engine of a device. Raises `ArgumentError` where nothing can be sent from there."""
        assert self.offload is not None, "a plan that sends nothing"
        with self._lock:
            found = self._made.get(device)
            if found is None:
                found = self._made[device] = self.offload.engine(devices.of(device))
                weakref.finalize(self, found.close)
            return found


def stated_link(offload: Offload, device: Device, buffer_bytes: int) -> Link:
    """Return a link by published rates, or by those of an ordinary disk, without measuring."""
    speed, each = DISK_BYTES_PER_SECOND, DISK_SECONDS_PER_COPY
    if offload.place == HOST:
        speed, each = device.rates.host_bytes_per_second, device.rates.seconds_per_call
    return Link(speed, speed, each, buffer_bytes, offload.most_bytes, offload.place)


def note_of(link: Link | None, costs: str) -> str:
    """Return a plan's note about a link that was not measured; empty if it was, or if there is none."""
    if link is None or costs == "measured":
        return ""
    where = "the host's memory" if link.place == HOST else link.place
    return (f"that data goes to {where} and back at {link.out_bytes_per_second / 1e9:.3g} GB/s each way is "
            "an estimate")


# -- Measured speed --------------------------------------------------------------------------------

T = TypeVar("T")
FORMAT = 4
"""Raised whenever what is measured changes: entries of another format count as unknown."""
REPEATS = 3
"""Measurements; their median counts."""
FIRST_BYTES = 2**22
"""Bytes copied in each direction, to find out how large copies may be."""
MOST_BYTES = 2**26
"""Bytes copied in each direction in a measurement. Measuring takes at most a quarter more of the device's
memory, and the memory of the computation and of the engine's buffers."""
TENSORS = 4
"""Number of tensors that are copied at once, in each direction."""
SECONDS = 0.3
"""Seconds that a measurement may take."""
SMALL, SMALL_BYTES = 16, 4096
"""Small copies, which tell what one takes however small it is."""
PACE_RUNS = 20
"""Number of runs of the computation that measure its time alone."""
REST_SECONDS = 5e-3
"""Between looks at whether copies are over, while nothing is computed."""
WIDTH = 512
"""Width of the matrices whose product is computed meanwhile."""


def measure_link(device: Device, engine: CopyEngine, folder: Path | None = None) -> Link:
    """Return the link between a device and the target of an engine. `folder`: where it is remembered, in
    addition to this process; None: nowhere.

    Raises:
        OffloadError: nothing can be sent there.
    """
    most = MOST_BYTES if engine.most_bytes is None else min(MOST_BYTES, engine.most_bytes // 2)
    sizes = dict.fromkeys((MOST_BYTES, most))       # rates of larger copies are those of small ones, too
    keys = [_key(device, engine.place, size) for size in sizes]
    rates = next((found for key in keys if (found := _found(key, folder))), None)
    if rates is None:
        with closing(device.copy_engine(engine.place, engine.most_bytes)) as plain:
            rates = _measured(device, plain, most)
        _remember(keys[-1], folder, rates)
    out, back, each, slows = rates
    return Link(out, back, each, engine.buffer_bytes, engine.most_bytes, engine.place, slows)


Rates = tuple[float, float, float, float]
"""Bytes per second out and in, seconds per copy, seconds of computing per byte copied."""
_known: dict[str, Rates] = {}


def _measured(device: Device, engine: CopyEngine, most: int) -> Rates:
    """Measure the link. `most`: bytes that may be under way at once, in each direction."""
    pace = _Pace(_computing(device))
    begun = min(FIRST_BYTES, most)
    slow = max(1e-9, *_round(device, engine, begun, 1, pace)[:2])
    small = [_round(device, engine, min(SMALL * SMALL_BYTES, most), SMALL, pace) for _ in range(REPEATS)]
    each = median(max(seconds[:2]) for seconds in small) / SMALL
    size = min(most, int(begun * SECONDS / slow))
    rounds = [_round(device, engine, size, TENSORS, pace) for _ in range(REPEATS)]
    out, back, lost = (median(seconds[k] for seconds in rounds) for k in range(3))
    taken = 0.0
    if device.host:
        busy = median(_round(device, engine, size, TENSORS, _Rest())[2] for _ in range(REPEATS))
        taken = busy if torch.get_num_threads() >= cores() else min(lost, busy)
    return _rate(size, out, each), _rate(size, back, each), each, taken / (2 * max(1, size))


class _Meanwhile(Protocol):
    """The device's work while copies are under way, and how its slowdown is counted."""

    def compute(self) -> None:
        """Do a short piece of the work."""

    def beside(self, run: Callable[[], T]) -> tuple[T, float]:
        """Return the result of a function that runs pieces of the work all the time, and the seconds that its
        copies cost."""


class _Rest:
    """Computes nothing; copies cost the processor seconds of this process."""

    def compute(self) -> None:
        """Wait a little."""
        time.sleep(REST_SECONDS)

    def beside(self, run: Callable[[], T]) -> tuple[T, float]:
        """See `_Meanwhile`."""
        start = time.process_time()
        result = run()
        return result, time.process_time() - start


class _Pace:
    """A computation. Copies cost the time by which it takes longer while they run."""

    def __init__(self, compute: Callable[[], object]) -> None:
        self._compute = compute
        self._runs = 0
        for _ in range(PACE_RUNS):
            compute()
        start = time.perf_counter()
        for _ in range(PACE_RUNS):
            compute()
        self._alone = (time.perf_counter() - start) / PACE_RUNS

    def compute(self) -> None:
        """Run the computation once more, and count it."""
        self._runs += 1
        self._compute()

    def beside(self, run: Callable[[], T]) -> tuple[T, float]:
        """Return the result of a function that runs the computation all the time, and the seconds that the
        computation lost."""
        self._runs = 0
        start = time.perf_counter()
        result = run()
        return result, max(0.0, time.perf_counter() - start - self._runs * self._alone)


def _rate(size: int, seconds: float, each: float) -> float:
    """Return bytes a second of copies, without the `each` seconds that a copy of any size takes. At most half
    of the time is subtracted."""
    return max(1, size) / max(seconds - TENSORS * each, seconds / 2)


def _round(device: Device, engine: CopyEngine, size: int, count: int, meanwhile: _Meanwhile
           ) -> tuple[float, float, float]:
    """Return seconds that `count` copies out of `size` bytes in all take, and as many copies back meanwhile;
    and those that they cost what the device does meanwhile."""
    sent, now = [f"sent {k}" for k in range(count)], [f"now {k}" for k in range(count)]
    held: list[torch.Tensor] = []
    call = engine.open()
    try:
        tensor = torch.ones(max(1, size // count), dtype=torch.uint8, device=device.torch_device)
        for key in sent:
            call.out(key, tensor)
        for key in sent:
            call.leave(key)
        device.synchronize()

        def begin() -> None:
            for leaving, coming in zip(now, sent, strict=True):
                call.out(leaving, tensor)
                held.append(call.back(coming))

        if device.host:
            device.give_back()          # in a step, what comes back takes fresh memory
        (out, back), cost = meanwhile.beside(
            lambda: device.ends_of(call, begin, now, sent, meanwhile.compute))
        return out, back, cost
    finally:
        device.synchronize()
        call.close()


def _computing(device: Device) -> Callable[[], object]:
    """Return a function that computes a product of matrices."""
    matrix = torch.ones(WIDTH, WIDTH, device=device.torch_device)
    result = torch.empty_like(matrix)

    def product() -> None:
        with torch.no_grad():
            torch.mm(matrix, matrix, out=result)

    return product


def _found(key: str, folder: Path | None) -> Rates | None:
    """Return the rates that are remembered in this process or in a folder."""
    found = _known.get(key)
    if found is None and folder is not None:
        found = _rates(read_json(_file(folder, key)))
        if found is not None:
            _known[key] = found
    return found


def _remember(key: str, folder: Path | None, rates: Rates) -> None:
    _known[key] = rates
    if folder is not None:
        store_json(_file(folder, key), list(rates))


def _file(folder: Path, key: str) -> Path:
    return folder / "links" / f"{key}.json"


def _rates(content: Any) -> Rates | None:
    """Return the rates in a file's content; None if the content is not a link's."""
    try:
        out, back, each, slows = map(float, content)
    except (TypeError, ValueError):
        return None
    sound = all(map(math.isfinite, (out, back, each, slows))) and min(out, back) > 0 and min(each, slows) >= 0
    return (out, back, each, slows) if sound else None


def _key(device: Device, place: str, most: int) -> str:
    """Return all that the rates depend on. `most`: bytes each way in a measurement, at most."""
    where = [place]
    if place != "host":
        with suppress(OSError):
            path = Path(place).expanduser().absolute()
            where = [str(path), str(path.stat().st_dev)]
    content = [FORMAT, most, device.key(), *where, torch.__version__, torch.get_num_threads(),
               platform.machine()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
