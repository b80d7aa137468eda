"""The CPU. Its allocator counts nothing, so peaks come from the profiler's memory events."""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from rkmate.device import events
from rkmate.device.kept_pages import give_back_free_pages
from rkmate.device.protocol import PartsMeter
from rkmate.devices import HOST
from rkmate.errors import ArgumentError
from rkmate.ir.simulate import Peak
from rkmate.offload.disk import FolderEngine
from rkmate.offload.protocol import CopyEngine, StepCopies, ends_by_threads
from rkmate.torch_seam.memory import allocations, mark, uses_onednn

T = TypeVar("T")

USUAL_CACHE_BYTES = 2**25
MOST_CACHE_BYTES = 2**26
"""A larger cache is shared by many cores, or in parts of which a core uses one."""
PART_BYTES = 2**21
"""About how large a chunk is: so much stays in the processor's cache."""


class Cpu:
    """The processor that Python runs on."""

    host = True
    cpu_kernels = True
    autocast_kind = "cpu"
    statistics = None
    first_call_allocates = False
    elsewhere = None
    rates = HOST

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def available(self) -> bool:
        return True

    def key(self) -> str:
        mkldnn: Any = torch.backends.mkldnn
        return (f"cpu {_processor()} {torch.backends.cpu.get_cpu_capability()} "
                f"{torch.backends.mkldnn.is_available()} {uses_onednn()} "
                f"{mkldnn.matmul.fp32_precision} {mkldnn.conv.fp32_precision}")

    def storage_bytes(self, size: int) -> int:
        return size

    def part_bytes(self, total: int) -> int:
        return PART_BYTES

    def memory(self) -> None:
        """Return None: the machine's memory does not belong to this process alone."""

    def allocator(self) -> None:
        """Return None: freed memory goes back to the system's allocator."""

    def give_back(self) -> None:
        give_back_free_pages()

    def warm_up(self) -> None:
        """Do nothing: libraries keep no memory that is counted."""

    def measure_peak(self, fn: Callable[[], T], *, timeline: bool = False) -> Peak[T]:
        return events.measure_peak(fn, "cpu", timeline=timeline)

    def parts_meter(self) -> EventsMeter:
        return EventsMeter()

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result

    @property
    def cache_bytes(self) -> int:
        return _cache_bytes()

    def synchronize(self) -> None:
        """Do nothing: a call on the CPU has ended when it returns."""

    def generator(self) -> torch.Generator:
        return torch.default_generator

    def copy_engine(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> CopyEngine:
        if place == "host":
            raise ArgumentError('offload is "host", which is where a model on the CPU is anyway: give a '
                                "folder on a disk (offload=\"/some/folder\")")
        return FolderEngine(place, most_bytes, verify=verify)

    def ends_of(self, call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                compute: Callable[[], object]) -> tuple[float, float]:
        return ends_by_threads(call, begin, out, back, compute)


class EventsMeter(PartsMeter):
    """The peak of each of several parts of one run, from one profile of it."""

    of_one_thread = True

    def __init__(self) -> None:
        self._sessions: list[Any] = []
        """Profilers of the stretches between pauses, in order."""
        self._open = ExitStack()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._sessions = []
        with events.sizes_remembered(), self._open:
            self._go_on()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._open.close()
        try:
            yield
        finally:
            self._go_on()

    def _go_on(self) -> None:
        self._sessions.append(self._open.enter_context(events.profiling()))

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        with mark(f"{_MARK}{number}"):
            yield

    def levels(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        inside: set[int] = set()
        live, total = 0, None
        for session in self._sessions:
            results = session.kineto_results
            seen = allocations(results, "cpu", None)
            if seen:        # what a pause has changed is known from the total of all threads
                live += 0 if total is None else seen[0].total - seen[0].bytes - total
                total = seen[-1].total
            changes, k = events.changes(seen, "cpu", inside), 0
            marks = sorted((e.start_ns(), e.end_ns(), int(e.name()[len(_MARK):]))
                           for e in results.events() if e.name().startswith(_MARK))
            for start, end, number in marks:
                while k < len(changes) and changes[k].ns < start:
                    live += changes[k].bytes
                    k += 1
                before = peak = live
                while k < len(changes) and changes[k].ns <= end:
                    live += changes[k].bytes
                    peak = max(peak, live)
                    k += 1
                found[number] = before, peak
            live += sum(change.bytes for change in changes[k:])
        return found


_MARK = "rkmate part "


@functools.cache
def _cache_bytes() -> int:
    """Return the bytes of the last cache, if the system tells them."""
    with contextlib.suppress(OSError, ValueError):
        sizes = [path.read_text(encoding="ascii").strip()
                 for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        if sizes:
            return min(max(int(size.rstrip("K")) * 2**10 for size in sizes), MOST_CACHE_BYTES)
    return USUAL_CACHE_BYTES


@functools.cache
def _processor() -> str:
    """Return the processor's name; Python's `platform` knows it on some systems only."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
