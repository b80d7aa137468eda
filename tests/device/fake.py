"""A test double: an accelerator over the CPU's tensors, with its own rounding, counters, clock and copies.

Inside ``with FakeDevice() as device:`` every CPU tensor counts as being on it, so what the package does
on an accelerator runs where there is none. Its copies are done when they begin.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from rkmate.device.protocol import MemoryState, PartsMeter, Statistics
from rkmate.device.registry import standing_in
from rkmate.devices import HOST
from rkmate.ir.allocator import CachingAllocator
from rkmate.ir.simulate import Peak
from rkmate.offload.copies import AwayBytes, CallCopies, Sent
from rkmate.offload.protocol import StepCopies, ends_by_threads
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.tensors import Form, TorchDispatchMode, storage_id

T = TypeVar("T")


class OwnStatistics(Statistics, Protocol):
    """Statistics of an allocator whose peak does not belong to the user."""

    def reset_peak(self) -> None:
        """Start to look for a new peak."""


def measured(statistics: OwnStatistics, run: Callable[[], Peak[T]]) -> Peak[T]:
    """Return the result of `run`, with the peak and the net that the allocator counts. The device must be
    idle before and after it. Resets the allocator's peak."""
    before = statistics.allocated()
    statistics.reset_peak()
    found = run()
    return replace(found, peak=statistics.peak() - before, net=statistics.allocated() - before)


class StatisticsMeter(PartsMeter):
    """The peak of each of several parts of one run. Resets the allocator's peak."""

    of_one_thread = False

    def __init__(self, statistics: OwnStatistics,
                 running: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """`running`: a context that is entered around the whole run."""
        self._statistics = statistics
        self._levels: dict[int, tuple[int, int]] = {}
        self._start = statistics.allocated()
        self._running = running

    def running(self) -> AbstractContextManager[object]:
        return self._running()

    def paused(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        before = self._statistics.allocated()
        self._statistics.reset_peak()
        yield
        self._levels[number] = before - self._start, self._statistics.peak() - self._start

    def levels(self) -> dict[int, tuple[int, int]]:
        return self._levels


class FakeEngine:
    """Sends to bytes of Python's."""

    def __init__(self, place: str, most_bytes: int | None = None, *, verify: bool = False,
                 buffer_bytes: int = 0) -> None:
        """`buffer_bytes`: that an open call takes, for nothing."""
        self.place, self.most_bytes, self.verify, self.buffer_bytes = place, most_bytes, verify, buffer_bytes
        self.away = AwayBytes(place, most_bytes)
        self.calls: weakref.WeakSet[FakeCopies] = weakref.WeakSet()
        """The open calls."""

    def open(self, *, verify: bool = False) -> FakeCopies:
        """See `CopyEngine.open`. Nothing gets lost here."""
        return FakeCopies(self)

    def close(self) -> None:
        """Nothing is kept."""


@dataclass(eq=False)
class _Stored(Sent):
    content: bytes = b""


class FakeCopies(CallCopies[_Stored]):
    """The copies of one call."""

    def __init__(self, engine: FakeEngine) -> None:
        self._calls = engine.calls
        self._buffers: torch.Tensor | None = torch.empty(engine.buffer_bytes, dtype=torch.uint8, device="cpu")
        super().__init__(engine.place, torch.device("cpu"), engine.away)
        self._calls.add(self)

    def _take(self, form: Form, tensor: torch.Tensor) -> _Stored:
        return _Stored(form, tensor)

    def _send(self, sent: _Stored, content: torch.UntypedStorage) -> None:
        sent.content = ctypes.string_at(content.data_ptr(), sent.form.nbytes)

    def _wait_out(self, sent: _Stored) -> None:
        """It has been copied."""

    def _fetch(self, sent: _Stored, content: torch.UntypedStorage) -> None:
        ctypes.memmove(content.data_ptr(), sent.content, sent.form.nbytes)

    def _wait_back(self, sent: _Stored) -> None:
        """It has been copied."""

    def _give_up(self) -> None:
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._buffers = None
        self._calls.discard(self)




class Ledger:
    """An allocator's counters, moved by hand or by `FakeDevice.counting`."""

    def __init__(self) -> None:
        self._level = self._peak = 0
        self.resets = 0
        """How often somebody reset the peak."""
        self.in_all: int | None = None
        """All bytes that were ever allocated, where that is counted."""
        self.on_change: Callable[[int], None] = lambda level: None
        """Told of each new level."""

    def add(self, size: int) -> None:
        """Allocate bytes; a negative number frees them."""
        self._level += size
        self._peak = max(self._peak, self._level)
        self.on_change(self._level)

    def allocated(self) -> int:
        return self._level

    def peak(self) -> int:
        return self._peak

    def handed_out(self) -> tuple[int, int] | None:
        return None if self.in_all is None else (self.allocated(), self.in_all)

    def reset_peak(self) -> None:
        self._peak = self._level
        self.resets += 1


class FakeDevice:
    """An accelerator that is none."""

    host = False
    autocast_kind = "cpu"
    elsewhere = None
    rates = HOST
    torch_device = torch.device("cpu")

    def __init__(self, *, rounding: int = 512, part_bytes: int = 2**12, total: int = 2**30,
                 seconds: Callable[[int], float] = lambda n: 1e-3, cpu_kernels: bool = False,
                 first_call_allocates: bool = False, name: str = "fake",
                 allocator: Callable[[], CachingAllocator] | None = None, library_bytes: int = 0,
                 copy_buffer_bytes: int = 0, cache_bytes: int = 0) -> None:
        """`rounding`: of storages, in bytes. `total`: bytes of the whole device. `seconds`: what the
        n-th timed call takes, from 0. `name`: part of the keys of remembered costs. `allocator`: makes a
        model of its allocator, if it has a caching one. `library_bytes`: what its libraries keep.
        `copy_buffer_bytes`: what copying takes. `cache_bytes`: of its caches."""
        self.statistics = Ledger()
        self.clock = 0.0
        """Seconds that all timed calls took."""
        self.calls = 0
        """Timed so far."""
        self.waits = 0
        """How often somebody waited for the device."""
        self.cpu_kernels = cpu_kernels
        self.first_call_allocates = first_call_allocates
        self.cache_bytes = cache_bytes
        self._rounding, self._part_bytes, self._total = rounding, part_bytes, total
        self._seconds, self._name, self._allocator = seconds, name, allocator
        self.library_bytes = library_bytes
        """Not taken yet."""
        self.copy_buffer_bytes = copy_buffer_bytes
        self.engines: list[FakeEngine] = []
        """The engines that were asked for."""
        self._stack = ExitStack()
        self._counters: list[_Counting] = []

    def __enter__(self) -> FakeDevice:
        self._stack.enter_context(standing_in("cpu", self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def available(self) -> bool:
        return True

    def key(self) -> str:
        return self._name

    def storage_bytes(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding

    def part_bytes(self, total: int) -> int:
        return self._part_bytes

    def memory(self) -> MemoryState:
        return MemoryState(self._total - self.statistics.allocated(), self._total, 0)

    def allocator(self) -> CachingAllocator | None:
        return None if self._allocator is None else self._allocator()

    def give_back(self) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        self.statistics.add(self.library_bytes)
        self.library_bytes = 0

    def measure_peak(self, fn: Callable[[], T], *, timeline: bool = False) -> Peak[T]:
        history: list[tuple[float, int]] = []
        start, before = self.clock, self.statistics.allocated()

        def run() -> Peak[T]:
            with self.counting():
                result = fn()
            return Peak(0, 0, self.clock - start, result, tuple(history))

        self.synchronize()
        if timeline:
            self.statistics.on_change = lambda level: history.append((self.clock - start, level - before))
        try:
            return measured(self.statistics, run)
        finally:
            self.statistics.on_change = lambda level: None

    def parts_meter(self) -> StatisticsMeter:
        return StatisticsMeter(self.statistics, self.counting)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        seconds = self._seconds(self.calls)
        self.calls += 1
        self.clock += seconds
        return seconds, call()

    def synchronize(self) -> None:
        self.waits += 1

    def generator(self) -> torch.Generator:
        return torch.default_generator

    def copy_engine(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> FakeEngine:
        self.engines.append(FakeEngine(place, most_bytes, verify=verify, buffer_bytes=self.copy_buffer_bytes))
        return self.engines[-1]

    def ends_of(self, call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                compute: Callable[[], object]) -> tuple[float, float]:
        return ends_by_threads(call, begin, out, back, compute)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, the counters follow the storages of the results of operations; memory that an
        operation takes and gives back within itself is not seen."""
        self._counters.append(_Counting(self))      # kept: what was made inside may be freed after it
        with self._counters[-1]:
            yield


class _Counting(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            self._watch(tensor, new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            self._watch(tensor, new=True)
        return result

    def _watch(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address in self._watched:
            return
        size = self._device.storage_bytes(storage.nbytes()) if new else 0
        self._device.statistics.add(size)

        def gone(_: object) -> None:
            del self._watched[address]
            self._device.statistics.add(-size)

        self._watched[address] = weakref.ref(storage, gone)
