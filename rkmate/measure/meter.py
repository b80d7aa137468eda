"""Exact memory of a computation: the greatest number of bytes alive at once.

On CUDA the caching allocator keeps statistics. On CPU there are none: the profiler is asked for the
event of each allocation and each free, which includes the temporary memory inside operations. What
does not come from torch's CPU allocator (scratch memory of math libraries, NumPy, Python) is not
seen, and neither is what a thread allocates that the call starts by itself; the threads of the
autograd engine are.

Private names of torch are used here, in versions 2.11 to 2.13: the tree of the profiler's events,
the flag by which the CPU allocator remembers sizes, and its log level.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import profiler

from rkmate.errors import ArgumentError, RkmateError
from rkmate.ir.peak import Peak

T = TypeVar("T")


class MeterError(RkmateError, RuntimeError):
    """Memory cannot be measured now: another profiler or measurement is running."""


def measure_peak(fn: Callable[[], T], device: torch.device | str | None = None, *,
                 timeline: bool = False) -> Peak[T]:
    """Call `fn` and measure the memory that it allocates on `device`.

    Args:
        fn: called once, in this thread.
        device: CPU unless given.
        timeline: also return the level after each event.

    Returns:
        Peak and net in bytes over the level at entry. On CPU, frees of blocks that were allocated
        before entry count only under `tracking`: without it their sizes are not known, and the peak
        is at most over-estimated by them.

    Raises:
        MeterError: a profiler is running, or another thread measures.
        ArgumentError: the device is neither a CPU nor a CUDA device.
        Exception: whatever `fn` raises.
    """
    where = torch.device("cpu" if device is None else device)
    if where.type == "cpu":
        return _measure_events(fn, where, timeline)
    if where.type == "cuda":
        return _measure_cuda(fn, where, timeline)
    raise ArgumentError(f"device is {str(where)!r}; memory can be measured on cpu and cuda")


class PartsMeter:
    """The peak of each of several parts of one run, at the price of one measurement."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: dict[int, int] = {}
        self._session: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The run that the parts belong to. Raises `MeterError` when a profiler is running."""
        if self._device.type == "cpu":
            with _profiling() as self._session:
                yield
        else:
            yield

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """One part; its number must be its own, and parts cannot overlap."""
        if self._device.type == "cpu":
            with profiler.record_function(f"{_MARK}{number}"):
                yield
        else:
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self._cuda[number] = torch.cuda.max_memory_allocated(self._device) - before

    def peaks(self) -> dict[int, int]:
        """Part -> greatest number of bytes over the level at its start. After the run."""
        if self._device.type != "cpu":
            return self._cuda
        results = self._session.kineto_results
        changes = _changes(results, self._device)
        marks = sorted((e.start_ns(), e.end_ns(), int(e.name()[len(_MARK):]))
                       for e in results.events() if e.name().startswith(_MARK))
        peaks: dict[int, int] = {}
        k = 0
        for start, end, number in marks:
            while k < len(changes) and changes[k].ns < start:
                k += 1
            live = peak = 0
            while k < len(changes) and changes[k].ns <= end:
                live += changes[k].bytes
                peak = max(peak, live)
                k += 1
            peaks[number] = peak
        return peaks


_MARK = "rkmate part "


@contextmanager
def tracking() -> Iterator[None]:
    """Inside, torch's CPU allocator remembers the size of every block that it allocates.

    A block allocated inside and freed within a later `measure_peak` call, also inside, is then
    subtracted. Costs about a microsecond for each allocation. May be nested.

    Raises:
        MeterError: this build of torch does not have the flag.
    """
    flag = _c10_variable("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool)
    if flag is None:
        raise MeterError("this build of torch cannot remember the sizes of CPU blocks")
    with _Tracked.lock:
        _Tracked.depth += 1
        flag.value = True
    try:
        yield
    finally:
        with _Tracked.lock:
            _Tracked.depth -= 1
            flag.value = _Tracked.depth > 0


class _Tracked:
    """How many `tracking` contexts are open, in the whole process as the flag is."""

    lock = threading.Lock()
    depth = 0


class _Change(NamedTuple):
    """An allocation (bytes > 0) or a free (bytes < 0)."""

    ns: int
    bytes: int


def _measure_events(fn: Callable[[], T], device: torch.device, timeline: bool) -> Peak[T]:
    with _profiling() as session:
        begin = time.perf_counter()
        result = fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    start = session.kineto_results.trace_start_ns()
    live = peak = 0
    levels: list[tuple[float, int]] = []
    for change in _changes(session.kineto_results, device):
        live += change.bytes
        peak = max(peak, live)
        if timeline:
            levels.append((max(0, change.ns - start) / 1e9, live))
    return Peak(peak, live, seconds, result, tuple(levels))


def _measure_cuda(fn: Callable[[], T], device: torch.device, timeline: bool) -> Peak[T]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    levels: tuple[tuple[float, int], ...] = ()
    if timeline:
        measured = _measure_events(fn, device, timeline=True)
        seconds, result, levels = measured.seconds, measured.result, measured.timeline
    else:
        begin = time.perf_counter()
        result = fn()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) - before
    return Peak(peak, torch.cuda.memory_allocated(device) - before, seconds, result, levels)


def _changes(results: Any, device: torch.device) -> list[_Change]:
    """The device's allocations and frees, in order of time."""
    allocation = torch._C._profiler._EventType.Allocation
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None \
        else device.index
    found: list[tuple[int, int, int]] = []
    todo = list(results.experimental_event_tree())
    while todo:
        node = todo.pop()
        todo.extend(node.children)
        if node.tag != allocation:
            continue
        fields = node.extra_fields
        if fields.device.type == device.type and (device.type == "cpu"
                                                  or fields.device.index == index):
            found.append((node.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort(key=lambda change: change[0])
    known = _Tracked.depth > 0 or device.type != "cpu"
    inside: set[int] = set()
    changes: list[_Change] = []
    for ns, address, size in found:
        if size > 0:
            inside.add(address)
        elif address in inside:
            inside.remove(address)
        elif not known:
            # Allocated before entry. The allocator may know a size for this address from an earlier
            # measurement, but another block may have taken the address since.
            continue
        changes.append(_Change(ns, size))
    return changes


_measuring = threading.Lock()
_QUIET = "99"
"""A log level of the profiler's library above all that it prints."""
_ERRORS_ONLY = 2
"""The log level of torch's core library that leaves warnings out."""


@contextmanager
def _profiling() -> Iterator[Any]:
    """A profiler of memory events; its results can be read after it."""
    if not _measuring.acquire(blocking=False):
        raise MeterError("memory is being measured already: measurements cannot be nested, and one "
                         "thread at a time can measure")
    try:
        if profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            raise MeterError("a profiler is running: memory cannot be measured inside it. Measure "
                             "outside, or stop the profiler first")
        session: Any = profiler.profile(use_cpu=True, profile_memory=True)
        with _silence(), session:
            yield session
    finally:
        _measuring.release()


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the profiler's notices off the standard error.

    It announces each start and stop, and warns about each free of a block that it does not know.
    The first is decided by the environment, which is read when the profiler starts.
    """
    level = _c10_variable("FLAGS_caffe2_log_level", ctypes.c_int)
    verbosity = level.value if level is not None else 0
    announced = os.environ.get("KINETO_LOG_LEVEL")
    if announced is None:
        os.environ["KINETO_LOG_LEVEL"] = _QUIET
    if level is not None:
        level.value = max(verbosity, _ERRORS_ONLY)
    try:
        yield
    finally:
        if level is not None:
            level.value = verbosity
        if announced is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)


_Variable = TypeVar("_Variable", ctypes.c_bool, ctypes.c_int)


def _c10_variable(name: str, kind: type[_Variable]) -> _Variable | None:
    """A global variable of torch's core library; None where the build has no such symbol."""
    file = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file))
        return kind.in_dll(library, name)
    except (OSError, ValueError):
        return None
