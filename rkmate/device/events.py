"""The profiler's memory events: each allocation and each free, temporary memory inside operations too.

What does not come from torch's allocator (scratch memory of math libraries, NumPy, Python) is not
seen, and neither is what a thread allocates that the call starts by itself. The threads of the autograd
engine are seen. What other threads free is known from the total of all threads, which each event tells:
gloo's threads let go of what was exchanged without an event.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rkmate.device.protocol import MeterError, MeterInUse, PartsMeter
from rkmate.ir.simulate import Peak
from rkmate.torch_seam.memory import (
    REMEMBERS_SIZES,
    Allocation,
    allocations,
    core_variable,
    is_profiling,
    memory_events,
    with_schedules,
)
from rkmate.torch_seam.tensors import inside_backward

T = TypeVar("T")


class Change(NamedTuple):
    """An allocation (bytes > 0) or a free (bytes < 0)."""

    ns: int
    bytes: int


def measure_peak(fn: Callable[[], T], kind: str, index: int | None = None, *,
                 timeline: bool = False) -> Peak[T]:
    """Call `fn`, which returns when the device is done, and measure what it allocates on a device of
    this kind (and with this index, where it has one).

    Frees of CPU blocks that were allocated before entry count only under `tracking`.
    """
    with profiling() as session:
        begin = time.perf_counter()
        result = fn()
        seconds = time.perf_counter() - begin
    results = session.kineto_results
    start = results.trace_start_ns()
    live = peak = 0
    history: list[tuple[float, int]] = []
    for change in changes(allocations(results, kind, index), kind, set()):
        live += change.bytes
        peak = max(peak, live)
        if timeline:
            history.append((max(0, change.ns - start) / 1e9, live))
    return Peak(peak, live, seconds, result, tuple(history))


def changes(found: Sequence[Allocation], kind: str, inside: set[int]) -> list[Change]:
    """Return a device's allocations and frees, in order of time. What threads of other libraries have freed
    comes before the next event that was seen. `inside`: the addresses of blocks whose sizes are known, which
    is kept up to date."""
    sizes_known = _Tracked.depth > 0 or kind != "cpu"
    result: list[Change] = []
    freed, unseen = 0, _freed_unseen(found) if kind == "cpu" else [0] * len(found)
    for (ns, address, size, _), now in zip(found, unseen, strict=True):
        if now != freed:
            result.append(Change(ns, freed - now))
            freed = now
        if size > 0:
            inside.add(address)
        elif address in inside:
            inside.remove(address)
        elif not sizes_known:
            # Allocated before entry. The allocator may know a size for this address from an earlier
            # measurement, but another block may have taken the address since.
            continue
        result.append(Change(ns, size))
    return result


def _freed_unseen(found: Sequence[Allocation]) -> list[int]:
    """Return, for each event, the bytes that other threads have freed before it, without an event: what the
    total of all threads has lost. What they have allocated, and hold, is not counted, and hides as many of
    these bytes."""
    lost: list[int] = []
    level = found[0].total - found[0].bytes if found else 0
    for event in found:
        level += event.bytes
        lost.append(level - event.total)
    # Events of two threads may come in another order than their totals: what is lost is lost later, too.
    return [max(0, min(pair)) for pair in zip(lost, (*lost[1:], *lost[-1:]), strict=True)]


@contextmanager
def tracking() -> Iterator[None]:
    """Let torch's CPU allocator remember the size of every block that it allocates inside the context.

    A block allocated inside and freed within a later `measure_peak` call, also inside, is then
    subtracted. Costs about a microsecond for each allocation. May be nested.

    Raises:
        MeterError: this build of torch does not have the flag.
    """
    with sizes_remembered() as is_possible:
        if not is_possible:
            raise MeterError("this build of torch cannot remember the sizes of CPU blocks, so memory cannot "
                             "be measured here: install a release that rkmate was tested with")
        with _Tracked.lock:
            _Tracked.depth += 1
        try:
            yield
        finally:
            with _Tracked.lock:
                _Tracked.depth -= 1


@contextmanager
def sizes_remembered() -> Iterator[bool]:
    """Let torch's CPU allocator remember the sizes of blocks, in all threads, and tell whether it can."""
    flag = core_variable(REMEMBERS_SIZES, ctypes.c_bool)
    if flag is None:
        yield False
        return
    with _Tracked.lock:
        _Tracked.remembering += 1
        flag.value = True
    try:
        yield True
    finally:
        with _Tracked.lock:
            _Tracked.remembering -= 1
            flag.value = _Tracked.remembering > 0


class _Tracked:
    """Number of open `tracking` contexts in the whole process, and of those that need the flag."""

    lock = threading.Lock()
    depth = remembering = 0


_measuring = threading.Lock()
_giving_way: list[tuple[Callable[[], None], int | None]] = []


class OpenRun:
    """A run of a meter that goes on between two calls of a user, one part after another."""

    def __init__(self, meter: PartsMeter, stop: Callable[[], None], is_over: Callable[[], bool] | None = None
                 ) -> None:
        """`stop`: called when another measurement is to begin, and once all was measured at an optimizer's
        step: afterwards, the user may start a profiler. `is_over`: tells whether all was measured; None for a
        measurement that looks for its optimizer by itself.

        Raises:
            MeterError: something else measures, or the schedule of a profiler may start that in the meantime.
        """
        self.meter = meter
        self._thread = threading.get_ident() if meter.of_one_thread else None
        """The only thread that may go on with the run; None if any may."""
        self._run, self._part = ExitStack(), ExitStack()
        if meter.of_one_thread and with_schedules():
            raise MeterError("a profiler has a schedule, and may start: until it has ended, memory cannot be "
                             "measured from one call to another")
        self._run.enter_context(meter.running())
        self.give_way_by(stop)
        if is_over is not None:
            self._run.callback(before_optimizers(functools.partial(_at_optimizer, is_over)))

    def may_go_on(self) -> bool:
        """Return whether this thread may measure parts, and end the run."""
        return self._thread in (None, threading.get_ident())

    def give_way_by(self, stop: Callable[[], None]) -> None:
        """Set what stops the run when another measurement is to begin."""
        _giving_way[:] = [(stop, self._thread)]

    def begin_part(self, number: int) -> None:
        """Measure another part of the run from now on."""
        self.end_part()
        self._part.enter_context(self.meter.part(number))

    def end_part(self) -> None:
        """End the part that is measured, if there is one."""
        self._part.close()

    def close(self) -> None:
        """End the run."""
        self.end_part()
        self._run.close()


def _at_optimizer(is_over: Callable[[], bool], _: torch.optim.Optimizer) -> None:
    """An optimizer steps: maybe that of another model, or inside of a backward."""
    if is_over():
        make_way()


def waits_for_backward() -> bool:
    """Return whether a measurement that goes on cannot give way before the backward that runs is over."""
    return inside_backward() and _measuring.locked()


def make_way() -> None:
    """Stop a measurement that gives way, unless only another thread can, or a backward runs: that gives its
    thread the profiler back, which nothing could stop any more."""
    while _giving_way and not inside_backward() and _giving_way[-1][1] in (None, threading.get_ident()):
        _giving_way.pop()[0]()


_calls: list[Callable[[torch.optim.Optimizer], None]] = []
_hooks: list[RemovableHandle] = []


def before_optimizers(call: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Call a function before each step of any optimizer, and return what ends that; the function itself may
    end it, too. Torch's own hooks must not come or go while an optimizer goes through them."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_optimizer))
    _calls.append(call)

    def end() -> None:
        if call in _calls:
            _calls.remove(call)
    return end


def _before_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for call in tuple(_calls):
        call(optimizer)


@contextmanager
def profiling() -> Iterator[Any]:
    """Profile memory events inside the context. Read the yielded profiler after the context."""
    make_way()
    measuring = _measuring          # the module's names may be gone when the process ends
    if not measuring.acquire(blocking=False):
        raise MeterInUse
    try:
        if is_profiling():
            raise MeterError("a profiler is running: memory cannot be measured inside it. Measure "
                             "outside, or stop the profiler first")
        with sizes_remembered(), memory_events() as session:
            yield session
    finally:
        measuring.release()
