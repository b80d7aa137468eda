"""The simulator: the memory and time of a schedule, for one call and for several calls before a backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph, CNode, Kernel
from rkmate.ir.link import Clocks
from rkmate.ir.schedule import (
    Compute,
    CopyIn,
    CopyOut,
    Free,
    Leave,
    Loss,
    Schedule,
    Start,
    in_place_donor,
    kernel_of,
)

# -- Device memory of a call: the value that the meter returns and pictures draw -------------------

T = TypeVar("T")


@dataclass(frozen=True)
class Peak(Generic[T]):
    """Bytes that a call allocated, over the level at its entry."""

    peak: int
    """Highest level. Never negative: at entry it is zero."""
    net: int
    """Level at exit; the result, which is held, included."""
    seconds: float
    """Time of the call. On CPU the profiler's own work is in it."""
    result: T
    """Result of the call."""
    timeline: tuple[tuple[float, int], ...] = ()
    """(seconds since entry, level) after each allocation and each free, when asked for."""


# -- The simulator: the only judge of a schedule ---------------------------------------------------

LOSS_SCALARS = 512
"""Bytes of what a loss outside keeps to the end: its value, the number its backward starts from."""


@dataclass(frozen=True)
class Simulation:
    """Cost of a schedule."""

    peak: int
    """Greatest number of bytes alive at once, temporaries included."""
    peak_at: int
    """Index of the step where the peak stands."""
    seconds: float
    """Seconds from the first computation to the end of the last one, including waits for copies and
    collectives."""
    saved: int
    """Bytes alive at the loss (the paper's M_save), before the output gradients arrive."""
    timeline: tuple[int, ...]
    """For each step: bytes alive during a computation (including temporaries), or after another step."""
    stalled: float = 0.0
    """Seconds of waiting for copies."""
    away: int = 0
    """Most bytes that are away at once."""
    copies_out: tuple[tuple[int, float, float], ...] = ()
    """(D node, start, end) of each copy out, in seconds."""
    copies_in: tuple[tuple[int, float, float], ...] = ()
    """(D node, start, end) of each copy back, in seconds."""
    exposed: float = 0.0
    """Seconds in which nothing computes, because a collective runs that the next computation waits for."""


def buffers_of(graph: CDGraph, schedule: Schedule) -> int:
    """Return bytes of the device that copying takes from the start of a step to its end."""
    return graph.link.buffer_bytes if graph.link is not None and schedule.copied else 0


def simulate(graph: CDGraph, schedule: Schedule, *, reserve_at_loss: int = 0,
             pinned: Iterable[int] = ()) -> Simulation:
    """Replay a schedule. Raises `ScheduleError` when it is not executable or incomplete, or decides
    something, or adds to a gradient, a second time, or copies what it must not.

    `reserve_at_loss`: bytes that the loss, computed outside, allocates for itself; of them, a few
    (the loss itself, the number one that its backward starts from) stay to the end. `pinned`: D nodes
    that the user holds (freeing one is an error).
    """
    pinned = set(pinned)
    alive: set[int] = set()
    fixed = set(graph.inputs)
    clocks = Clocks(graph.link)
    where = Residency(graph, pinned)
    peak_at = saved = 0
    copies = bool(schedule.copied)
    clocked = copies or schedule.starts
    running: dict[int, tuple[int, ...]] = {}     # collectives, and what they read and make
    coming: set[int] = set()
    live = peak = buffers_of(graph, schedule)
    taken: set[int] = set()
    seen_loss = False
    ran: set[int] = set()
    timeline: list[int] = []
    steps, size, decided, nodes = schedule.steps, [d.size for d in graph.d], graph.decided, graph.c
    seconds, exposed, last = 0.0, 0.0, len(steps) - 1
    for k, step in enumerate(steps):
        now = live
        if isinstance(step, Compute):
            node = nodes[step.c]
            if not seen_loss and node.phase == "backward":
                raise ScheduleError(f"step {k}: {node.name} runs before the loss")
            if node.decides and step.c in ran:
                raise ScheduleError(f"step {k}: {node.name} decides, and would decide a second time")
            if node.adds and step.c in ran:
                raise ScheduleError(f"step {k}: {node.name} adds to a gradient, and would add a second time")
            if not alive.issuperset(node.inputs):
                for j in node.inputs:
                    if j not in alive and j not in fixed:
                        raise ScheduleError(f"step {k}: {node.name} reads {graph.d[j].name}, not in memory")
            if coming and not coming.isdisjoint(node.inputs):
                raise ScheduleError(f"step {k}: {node.name} reads what a collective has not made yet")
            begun = running.pop(step.c, None) if running else None
            if begun is not None:
                coming.difference_update(node.outputs)
            if copies:
                for j in node.inputs:
                    clocks.arrive(j)
                    where.read(j)
            # A second run creates all of the outputs anew, also those that are still there.
            remade = 0
            donor = in_place_donor(graph, steps, k) \
                if node.donors and k < last and isinstance(steps[k + 1], Free) else None
            if donor is not None:
                # The output takes the input's storage: when the input is freed, nothing is freed.
                live -= size[donor]
                taken.add(donor)
            for j in node.outputs if begun is None else ():
                if copies:
                    where.make(j, k)
                if j in alive:
                    remade += size[j]
                else:
                    alive.add(j)
                    live += size[j]
            kernel: CNode | Kernel = kernel_of(graph, step) if step.kernel else node
            now = live + remade + kernel.overhead
            if begun is not None:
                now = live
                live -= kernel.overhead
            if not clocked:
                seconds += kernel.time
                if node.exchanges:
                    exposed += kernel.time
            else:
                clocks.run(step.c, kernel.time, node.exchanges)
            ran.add(step.c)
        elif isinstance(step, Free):
            if step.d not in alive:
                raise ScheduleError(f"step {k}: frees {graph.d[step.d].name}, which is not in memory")
            if step.d in pinned:
                raise ScheduleError(f"step {k}: frees {graph.d[step.d].name}, which the user holds")
            if step.d in decided:
                raise ScheduleError(f"step {k}: frees {graph.d[step.d].name}, which was decided and stays")
            if running and any(step.d in busy for busy in running.values()):
                raise ScheduleError(f"step {k}: frees {graph.d[step.d].name} while a collective runs on it")
            if copies:
                where.free(step.d, k)
            alive.discard(step.d)
            if step.d in taken:
                taken.discard(step.d)
            else:
                live -= size[step.d]
            now = live
        elif isinstance(step, Loss):
            missing = [j for j in graph.outputs if (j not in alive and j not in fixed) or j in where.coming]
            if running:
                raise ScheduleError(f"step {k}: the loss comes while a collective runs")
            if seen_loss or missing:
                names = ", ".join(graph.d[j].name for j in missing)
                raise ScheduleError(f"step {k}: the loss comes twice or without {names or 'need'}")
            seen_loss = True
            saved = live
            live += min(reserve_at_loss, LOSS_SCALARS)
            for j in graph.output_grads:
                alive.add(j)
                live += graph.d[j].size
            now = max(live, saved + reserve_at_loss)
        elif isinstance(step, CopyOut):
            where.copy_out(step.d, k, step.d in alive)
            clocks.copy_out(step.d, graph.d[step.d].size)
            now = live
        elif isinstance(step, Leave):
            where.leave(step.d, k)
            clocks.leave(step.d)
            alive.discard(step.d)
            live -= graph.d[step.d].size
            now = live
        elif isinstance(step, CopyIn):
            where.copy_in(step.d, k, step.d in alive)
            clocks.copy_in(step.d, graph.d[step.d].size)
            alive.add(step.d)
            live += graph.d[step.d].size
            now = live
        elif isinstance(step, Start):
            node = nodes[step.c]
            if node.phase == "backward" and not seen_loss:
                raise ScheduleError(f"step {k}: {node.name} starts before the loss")
            if not node.exchanges or node.donors or node.alternatives or step.c in running:
                raise ScheduleError(f"step {k}: {node.name} cannot be started before it is waited for")
            for j in node.inputs:
                if (j not in alive and j not in fixed) or j in coming:
                    raise ScheduleError(f"step {k}: {node.name} reads {graph.d[j].name}, not in memory")
            if not alive.isdisjoint(node.outputs):
                raise ScheduleError(f"step {k}: {node.name} makes what is in memory")
            running[step.c] = (*node.inputs, *node.outputs)
            coming.update(node.outputs)
            alive.update(node.outputs)
            live += sum([size[j] for j in node.outputs]) + node.overhead
            clocks.start(step.c, node.time)
            now = live
        timeline.append(now)
        if now > peak:
            peak, peak_at = now, k
    left_out = [graph.c[i].name for i in range(len(graph.c)) if i not in ran]
    if left_out:
        raise ScheduleError(f"the schedule never runs {', '.join(left_out[:5])}")
    return Simulation(peak, peak_at, clocks.now if clocked else seconds, saved, tuple(timeline),
                      clocks.stalled, where.bytes, tuple(clocks.out), tuple(clocks.back),
                      clocks.exposed if clocked else exposed)


class Residency:
    """Data that is away or being copied. Checks each step; raises `ScheduleError`."""

    def __init__(self, graph: CDGraph, pinned: Collection[int]) -> None:
        self.graph = graph
        self.pinned = pinned
        self.leaving: set[int] = set()
        """D nodes that are being copied out and still in memory."""
        self.away: set[int] = set()
        """D nodes with a copy that is away, to the end of the step."""
        self.coming: set[int] = set()
        """D nodes that are being copied back and not read yet."""
        self.bytes = 0
        """Bytes that are away. They stay there: most are away at the end of the step."""

    def read(self, d: int) -> None:
        """Note that a computation reads D node `d`, and has waited for it."""
        self.coming.discard(d)

    def make(self, d: int, step: int) -> None:
        """Note that a computation makes `d`."""
        if d in self.leaving or d in self.coming:
            raise self._wrong(step, f"makes {self._name(d)} while it is copied")

    def free(self, d: int, step: int) -> None:
        """Note that `d` is freed without waiting for a copy."""
        if d in self.leaving or d in self.coming:
            raise self._wrong(step, f"frees {self._name(d)} while it is copied")

    def copy_out(self, d: int, step: int, there: bool) -> None:
        """Note that a copy out of `d` begins. `there`: whether `d` is in memory."""
        if not there or d in self.coming:
            raise self._wrong(step, f"copies {self._name(d)} away, which is not in memory")
        if d in self.away:
            raise self._wrong(step, f"copies {self._name(d)} away a second time")
        if self.graph.producer[d] is None or d in self.pinned:
            raise self._wrong(step, f"copies {self._name(d)} away, which somebody else holds")
        self.leaving.add(d)
        self.away.add(d)
        self.bytes += self.graph.d[d].size

    def leave(self, d: int, step: int) -> None:
        """Note that `d` is freed when its copy out has ended."""
        if d not in self.leaving:
            raise self._wrong(step, f"lets {self._name(d)} leave, which is not being copied away")
        self.leaving.discard(d)

    def copy_in(self, d: int, step: int, there: bool) -> None:
        """Note that a copy back of `d` begins. `there`: whether `d` is in memory."""
        if d not in self.away or there:
            raise self._wrong(step, f"copies {self._name(d)} back, which is not away")
        self.coming.add(d)

    def _name(self, d: int) -> str:
        return self.graph.d[d].name

    @staticmethod
    def _wrong(step: int, why: str) -> ScheduleError:
        return ScheduleError(f"step {step}: {why}")


# -- The memory of a step in which a module is called several times before the backward ------------

def lasting_of_loss(graph: CDGraph, reserve_at_loss: int) -> int:
    """Return the bytes of a reserve that a loss may hold until its backward: all but the gradients of the
    outputs, which its backward makes."""
    return max(0, reserve_at_loss - graph.bytes(graph.output_grads))


def waiting_bytes(graph: CDGraph, reserve_at_loss: int) -> int:
    """Return the bytes that a call holds on top of what it saves while others run: those of its loss, or the
    gradients of its outputs."""
    return max(lasting_of_loss(graph, reserve_at_loss), graph.bytes(graph.output_grads))


def peak_with_gradients(graph: CDGraph, schedule: Schedule, found: Simulation) -> int:
    """Return the peak of a call whose gradients of parameters stay until its backward is over, because no
    gradients were there to add them to. `found`: what `simulate` has found."""
    gone, peak = 0, found.peak
    for step, level in zip(schedule.steps, found.timeline, strict=True):
        if isinstance(step, Free) and step.d in graph.releases:
            gone += graph.d[step.d].size
        peak = max(peak, level + gone)
    return peak


def peak_of_calls(graph: CDGraph, schedule: Schedule, calls: int, *, reserve_at_loss: int = 0,
                  pinned: Iterable[int] = ()) -> int:
    """Return bytes alive at once, at most, in a step of `calls` forwards, one loss, and the backward of each.

    Every call follows the schedule, with values of its own. The backwards come one after the other, in any
    order. A parameter's gradients are added up, and wait for those of the last call. Raises `ScheduleError`
    as `simulate` does.
    """
    result = simulate(graph, schedule, reserve_at_loss=reserve_at_loss, pinned=pinned)
    if calls == 1:
        return result.peak
    others = calls - 1
    at = schedule.steps.index(Loss())
    forward, backward = result.timeline[:at], result.timeline[at + 1:]
    # What a call holds before its backward, and after it, when the buffers of its copies are gone.
    lasting = lasting_of_loss(graph, reserve_at_loss)
    before = result.saved + waiting_bytes(graph, reserve_at_loss)
    after = result.timeline[-1] - buffers_of(graph, schedule)
    leaves: dict[int, list[int]] = {}
    for j, i in graph.releases.items():
        leaves.setdefault(i, []).append(j)
    added_up = 0
    peak = max(others * (result.saved + lasting) + result.saved + reserve_at_loss, calls * before,
               others * result.saved + max(forward, default=0))
    for step, level in zip(schedule.steps[at + 1:], backward, strict=True):
        peak = max(peak, others * before + level + added_up)
        if isinstance(step, Compute):
            added_up += graph.bytes(leaves.pop(step.c, ()))
    # The second backward, and the last one.
    highest = max(backward, default=0) + added_up
    return max(peak, (others - 1) * before + after + highest, others * after + highest)
