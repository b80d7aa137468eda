"""The simulator: the memory and time of a schedule, for one call and for several calls before a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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
    timeline: tuple[tuple[float, int], ...] = field(default=(), repr=False)
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


def simulate(graph: CDGraph, schedule: Schedule) -> Simulation:
    """Replay a schedule. Raises `ScheduleError` when it is not executable or incomplete, or decides
    something, or adds to a gradient, a second time, or copies or frees what it must not.
    """
    replay = _Replay(graph, schedule)
    compute, free, others = replay.compute, replay.free, replay.others
    timeline: list[int] = []
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            timeline.append(compute(k, step))
        elif isinstance(step, Free):
            timeline.append(free(k, step.d))
        else:
            timeline.append(others[type(step)](k, step))
    return replay.result(timeline)


class _Replay:
    """What is in memory, runs and is copied after each step of a schedule, with the bytes and the seconds.
    Each kind of step is a method: it checks the step, and returns the bytes that are alive in a computation
    or after another step."""

    def __init__(self, graph: CDGraph, schedule: Schedule) -> None:
        self.graph, self.steps, self.held = graph, schedule.steps, set(graph.held)
        self.others: dict[type, Callable[[int, Any], int]] = {
            Loss: self.loss, CopyOut: self.copy_out, Leave: self.leave, CopyIn: self.copy_in,
            Start: self.start}
        """The methods of all kinds of steps but the two frequent ones."""
        self.copies = bool(schedule.copied)
        self.clocked = self.copies or schedule.starts
        """Whether seconds depend on copies and collectives that run during computations."""
        self.sizes = [d.size for d in graph.d]
        self.fixed = set(graph.inputs)
        self.decided = graph.decided
        self.alive: set[int] = set()
        self.live = buffers_of(graph, schedule)
        self.saved = 0
        self.taken: set[int] = set()
        """D nodes that are alive, and whose storage an output has taken."""
        self.ran: set[int] = set()
        self.seen_loss = False
        self.running: dict[int, tuple[int, ...]] = {}
        """Collectives that have been started, and what each reads and makes."""
        self.coming: set[int] = set()
        """D nodes that these make."""
        self.clocks, self.where = Clocks(graph.link), Residency(graph)
        self.seconds = self.exposed = 0.0

    def compute(self, k: int, step: Compute) -> int:
        """Run a C node, or wait for the collective that it is."""
        graph, alive, size = self.graph, self.alive, self.sizes
        node = graph.c[step.c]
        if not self.seen_loss and node.phase == "backward":
            raise ScheduleError(f"step {k}: {node.name} runs before the loss")
        if (node.decides or node.adds) and step.c in self.ran:
            does, do = ("decides", "decide") if node.decides else ("adds to a gradient", "add")
            raise ScheduleError(f"step {k}: {node.name} {does}, and would {do} a second time")
        if not alive.issuperset(node.inputs):
            for j in node.inputs:
                if j not in alive and j not in self.fixed:
                    raise ScheduleError(f"step {k}: {node.name} reads {graph.d[j].name}, not in memory")
        if self.coming and not self.coming.isdisjoint(node.inputs):
            raise ScheduleError(f"step {k}: {node.name} reads what a collective has not made yet")
        begun = self.running.pop(step.c, None) if self.running else None
        if begun is not None:
            self.coming.difference_update(node.outputs)
        if self.copies:
            for j in node.inputs:
                self.clocks.arrive(j)
                self.where.read(j)
        # A second run creates all of the outputs anew, also those that are still there.
        remade, live = 0, self.live
        donor = in_place_donor(graph, self.steps, k) \
            if node.donors and k + 1 < len(self.steps) and isinstance(self.steps[k + 1], Free) else None
        if donor is not None:
            # The output takes the input's storage: when the input is freed, nothing is freed.
            live -= size[donor]
            self.taken.add(donor)
        for j in node.outputs if begun is None else ():
            if self.copies:
                self.where.make(j, k)
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
        self.live = live
        if not self.clocked:
            self.seconds += kernel.time
            if node.exchanges:
                self.exposed += kernel.time
        else:
            self.clocks.run(step.c, kernel.time, node.exchanges)
        self.ran.add(step.c)
        return now

    def free(self, k: int, d: int) -> int:
        """Free a D node."""
        if d not in self.alive:
            raise ScheduleError(f"step {k}: frees {self.graph.d[d].name}, which is not in memory")
        if d in self.held:
            raise ScheduleError(f"step {k}: frees {self.graph.d[d].name}, which the user holds")
        if d in self.decided:
            raise ScheduleError(f"step {k}: frees {self.graph.d[d].name}, which was decided and stays")
        if self.running and any(d in busy for busy in self.running.values()):
            raise ScheduleError(f"step {k}: frees {self.graph.d[d].name} while a collective runs on it")
        if self.copies:
            self.where.free(d, k)
        self.alive.discard(d)
        if d in self.taken:
            self.taken.discard(d)
        else:
            self.live -= self.sizes[d]
        return self.live

    def loss(self, k: int, step: Loss) -> int:
        """Compute the loss, outside: the gradients of the outputs arrive."""
        graph = self.graph
        missing = [j for j in graph.outputs
                   if (j not in self.alive and j not in self.fixed) or j in self.where.coming]
        if self.running:
            raise ScheduleError(f"step {k}: the loss comes while a collective runs")
        if self.seen_loss or missing:
            names = ", ".join(graph.d[j].name for j in missing)
            raise ScheduleError(f"step {k}: the loss comes twice or without {names or 'need'}")
        self.seen_loss = True
        self.saved = self.live
        self.alive.update(graph.output_grads)
        self.live += min(graph.reserve_at_loss, LOSS_SCALARS) + sum(self.sizes[j] for j in graph.output_grads)
        return max(self.live, self.saved + graph.reserve_at_loss)

    def copy_out(self, k: int, step: CopyOut) -> int:
        """Begin a copy of a D node away."""
        self.where.copy_out(step.d, k, step.d in self.alive)
        self.clocks.copy_out(step.d, self.sizes[step.d])
        return self.live

    def leave(self, k: int, step: Leave) -> int:
        """Free a D node when its copy away has ended."""
        self.where.leave(step.d, k)
        self.clocks.leave(step.d)
        self.alive.discard(step.d)
        self.live -= self.sizes[step.d]
        return self.live

    def copy_in(self, k: int, step: CopyIn) -> int:
        """Begin a copy of a D node back."""
        self.where.copy_in(step.d, k, step.d in self.alive)
        self.clocks.copy_in(step.d, self.sizes[step.d])
        self.alive.add(step.d)
        self.live += self.sizes[step.d]
        return self.live

    def start(self, k: int, step: Start) -> int:
        """Start a collective, which runs until the C node is computed."""
        graph = self.graph
        node = graph.c[step.c]
        if node.phase == "backward" and not self.seen_loss:
            raise ScheduleError(f"step {k}: {node.name} starts before the loss")
        if not node.exchanges or node.donors or node.alternatives or step.c in self.running:
            raise ScheduleError(f"step {k}: {node.name} cannot be started before it is waited for")
        for j in node.inputs:
            if (j not in self.alive and j not in self.fixed) or j in self.coming:
                raise ScheduleError(f"step {k}: {node.name} reads {graph.d[j].name}, not in memory")
        if not self.alive.isdisjoint(node.outputs):
            raise ScheduleError(f"step {k}: {node.name} makes what is in memory")
        self.running[step.c] = (*node.inputs, *node.outputs)
        self.coming.update(node.outputs)
        self.alive.update(node.outputs)
        self.live += sum(self.sizes[j] for j in node.outputs) + node.overhead
        self.clocks.start(step.c, node.time)
        return self.live

    def result(self, timeline: Sequence[int]) -> Simulation:
        """Return the verdict after the last step. `timeline`: what the steps' methods have returned."""
        left_out = [node.name for i, node in enumerate(self.graph.c) if i not in self.ran]
        if left_out:
            raise ScheduleError(f"the schedule never runs {', '.join(left_out[:5])}")
        peak = max(timeline, default=self.live)
        at = timeline.index(peak) if timeline else 0
        clocks, clocked = self.clocks, self.clocked
        return Simulation(peak, at, clocks.now if clocked else self.seconds,
                          self.saved, tuple(timeline), clocks.stalled, self.where.bytes, tuple(clocks.out),
                          tuple(clocks.back), clocks.exposed if clocked else self.exposed)


class Residency:
    """Data that is away or being copied. Checks each step; raises `ScheduleError`."""

    def __init__(self, graph: CDGraph) -> None:
        self.graph = graph
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
        if self.graph.producer[d] is None or d in self.graph.held:
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

def lasting_of_loss(graph: CDGraph) -> int:
    """Return the bytes of a reserve that a loss may hold until its backward: all but the gradients of the
    outputs, which its backward makes."""
    return max(0, graph.reserve_at_loss - graph.bytes(graph.output_grads))


def waiting_bytes(graph: CDGraph) -> int:
    """Return the bytes that a call holds on top of what it saves while others run: those of its loss, or the
    gradients of its outputs."""
    return max(lasting_of_loss(graph), graph.bytes(graph.output_grads))


def peak_with_gradients(graph: CDGraph, schedule: Schedule, found: Simulation) -> int:
    """Return the peak of a call whose gradients of parameters stay until its backward is over, because no
    gradients were there to add them to. `found`: what `simulate` has found."""
    gone, peak = 0, found.peak
    for step, level in zip(schedule.steps, found.timeline, strict=True):
        if isinstance(step, Free) and step.d in graph.releases:
            gone += graph.d[step.d].size
        peak = max(peak, level + gone)
    return peak


def peak_of_calls(graph: CDGraph, schedule: Schedule, calls: int) -> int:
    """Return bytes alive at once, at most, in a step of `calls` forwards, one loss, and the backward of each.

    Every call follows the schedule, with values of its own. The backwards come one after the other, in any
    order. A parameter's gradients are added up, and wait for those of the last call. Raises `ScheduleError`
    as `simulate` does.
    """
    result = simulate(graph, schedule)
    if calls == 1:
        return result.peak
    others = calls - 1
    at = schedule.steps.index(Loss())
    forward, backward = result.timeline[:at], result.timeline[at + 1:]
    # What a call holds before its backward, and after it, when the buffers of its copies are gone.
    lasting = lasting_of_loss(graph)
    before = result.saved + waiting_bytes(graph)
    after = result.timeline[-1] - buffers_of(graph, schedule)
    leaves: dict[int, list[int]] = {}
    for j, i in graph.releases.items():
        leaves.setdefault(i, []).append(j)
    added_up = 0
    peak = max(others * (result.saved + lasting) + result.saved + graph.reserve_at_loss, calls * before,
               others * result.saved + max(forward, default=0))
    for step, level in zip(schedule.steps[at + 1:], backward, strict=True):
        peak = max(peak, others * before + level + added_up)
        if isinstance(step, Compute):
            added_up += graph.bytes(leaves.pop(step.c, ()))
    # The second backward, and the last one.
    highest = max(backward, default=0) + added_up
    return max(peak, (others - 1) * before + after + highest, others * after + highest)
