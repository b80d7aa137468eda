"""A plan's schedule replayed with names: what is in memory at each step, of which kind, and whose.

The levels are the simulator's own: the stacked kinds add up to its timeline, step by step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rkmate.errors import ScheduleError
from rkmate.ir.cd import Kernel
from rkmate.ir.kernels import choose_kernels
from rkmate.ir.plan import PlanData
from rkmate.ir.schedule import Compute, Free, Schedule, from_order, in_place_donor, kernel_of
from rkmate.ir.simulate import LOSS_SCALARS, simulate
from rkmate.ir.summary import GraphSummary

Kind = Literal["kept", "recomputed", "gradients", "temporaries", "loss"]
KINDS: tuple[Kind, ...] = ("kept", "recomputed", "gradients", "temporaries", "loss")
KIND_NAMES: dict[Kind, str] = {
    "kept": "kept activations", "recomputed": "recomputed activations", "gradients": "gradients",
    "temporaries": "temporaries of operations", "loss": "the caller's loss"}


@dataclass(frozen=True)
class Tensor:
    """One storage in memory at a moment."""

    name: str
    shape: str
    path: str
    """Module of the user's model."""
    operation: str
    block: int
    bytes: int
    kind: Kind


@dataclass(frozen=True)
class Moment:
    """One step of the schedule."""

    start: float
    """Seconds since the step's begin."""
    end: float
    computation: int | None
    """The C node that runs; None for other steps."""
    again: bool
    """The computation has run before."""
    kernel: int
    """By which kernel: 0 is its own, the others have fewer and larger parts."""
    bytes: tuple[int, ...]
    """By kind, in the order of `KINDS`: while a computation runs, or after another step."""

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return sum(self.bytes)


@dataclass(frozen=True)
class Occupancy:
    """A whole training step: what occupies memory at each moment."""

    graph: GraphSummary
    schedule: Schedule
    moments: tuple[Moment, ...]
    peak_at: int
    loss_at: int
    """Index of the loss among the moments."""
    alive_at_peak: tuple[tuple[int, Kind], ...]
    """Storages in memory at the peak."""
    alive_at_loss: frozenset[int]
    """Storages that the forward leaves to the backward."""
    spans: tuple[tuple[int, int, int, bool], ...]
    """(storage, first moment, moment after the last, made again): when each storage is there."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.moments[self.peak_at].total

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.moments[-1].end

    @property
    def loss_seconds(self) -> float:
        """When the forward ends."""
        return self.moments[self.loss_at].end

    @cached_property
    def peak_tensors(self) -> tuple[Tensor, ...]:
        """What stands at the peak, greatest first; temporaries last of equals."""
        found = [self._tensor(j, kind) for j, kind in self.alive_at_peak
                 if self.graph.storages[j].size]
        moment = self.moments[self.peak_at]
        extra = moment.bytes[KINDS.index("temporaries")]
        if extra:
            c = self.graph.computations[moment.computation or 0]
            found.append(Tensor(f"inside {c.name}", "", c.path, c.operation, c.block, extra,
                                "temporaries"))
        outside = moment.bytes[KINDS.index("loss")]
        if outside:
            found.append(Tensor("the caller's loss", "", "", "", -1, outside, "loss"))
        return tuple(sorted(found, key=lambda t: -t.bytes))

    def _tensor(self, j: int, kind: Kind) -> Tensor:
        storage, maker = self.graph.storages[j], self.graph.maker[j]
        if maker is None:
            return Tensor(storage.name, storage.shape, "", "gradient of an output", -1, storage.size,
                          kind)
        c = self.graph.computations[maker]
        return Tensor(storage.name, storage.shape, c.path, c.operation, c.block, storage.size, kind)

    @cached_property
    def recomputed_seconds(self) -> dict[int, float]:
        """Per computation that runs again: the time of its further runs."""
        result: dict[int, float] = {}
        for m in self.moments:
            if m.computation is not None and m.again:
                result[m.computation] = result.get(m.computation, 0.0) + m.end - m.start
        return result

    def block_bytes(self, block: int) -> list[int]:
        """Bytes of a block's forward storages at each moment."""
        change = [0] * (len(self.moments) + 1)
        for j, first, last, _ in self.spans:
            maker = self.graph.maker[j]
            if maker is not None and maker < self.graph.loss \
                    and self.graph.computations[maker].block == block:
                change[first] += self.graph.storages[j].size
                change[last] -= self.graph.storages[j].size
        level, levels = 0, []
        for c in change[:-1]:
            level += c
            levels.append(level)
        return levels


def replay(plan: PlanData) -> Occupancy:
    """The schedule of a plan. Raises `ScheduleError` when it does not run."""
    return replay_schedule(plan.graph, plan.schedule)


def replay_baseline(plan: PlanData) -> Occupancy:
    """The same model without rematerialization."""
    graph, cd = plan.graph, plan.graph.cd
    schedule = from_order(cd, range(len(cd.c)), cd.loss, graph.pinned)
    return replay_schedule(graph, choose_kernels(cd, schedule, pinned=graph.pinned,
                                                 reserve_at_loss=graph.reserve_at_loss))


def replay_schedule(graph: GraphSummary, schedule: Schedule) -> Occupancy:
    """Occupancy one schedule. Raises `ScheduleError` when it does not run."""
    result = simulate(graph.cd, schedule, pinned=graph.pinned, reserve_at_loss=graph.reserve_at_loss)
    walk = _Walk(graph)
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            walk.compute(k, step, kernel_of(graph.cd, step),
                         in_place_donor(graph.cd, schedule.steps, k))
        elif isinstance(step, Free):
            walk.forget(k, step.d)
        else:
            walk.loss(k)
        if walk.moments[-1].total != result.timeline[k]:
            raise ScheduleError(f"step {k}: {walk.moments[-1].total:,} bytes by kind, "
                                f"{result.timeline[k]:,} in the simulator")
        if k == result.peak_at:
            alive_at_peak = tuple((j, walk.kind[j]) for j in sorted(walk.alive)
                                  if j not in walk.taken)
    end = len(schedule.steps)
    walk.close(end)
    return Occupancy(graph, schedule, tuple(walk.moments), result.peak_at, walk.loss_at, alive_at_peak,
                  frozenset(walk.at_loss), tuple(walk.spans))


class _Walk:
    """The state between two steps."""

    def __init__(self, graph: GraphSummary) -> None:
        self.graph = graph
        self.alive: dict[int, int] = {}                 # storage -> moment of its creation
        self.kind: dict[int, Kind] = {}
        self.again: dict[int, bool] = {}
        self.level: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.taken: dict[int, int] = {}                 # overwritten storage -> moment
        self.ran: set[int] = set()
        self.now = 0.0
        self.moments: list[Moment] = []
        self.spans: list[tuple[int, int, int, bool]] = []
        self.loss_at = 0
        self.at_loss: set[int] = set()

    def _add(self, k: int, j: int, again: bool) -> None:
        gradient = self.graph.storages[j].kind == "grad"
        self.kind[j] = "gradients" if gradient else "recomputed" if again else "kept"
        self.alive[j] = k
        self.again[j] = again
        self.level[self.kind[j]] += self.graph.storages[j].size

    def _record(self, start: float, step: Compute | None = None, again: bool = False,
                extra: Iterable[tuple[Kind, int]] = ()) -> None:
        level = dict(self.level)
        for kind, n in extra:
            level[kind] += n
        self.moments.append(Moment(start, self.now, step.c if step else None, again,
                                   step.kernel if step else 0,
                                   tuple(level[kind] for kind in KINDS)))

    def compute(self, k: int, step: Compute, kernel: Kernel, place: int | None) -> None:
        node = self.graph.computations[step.c]
        again = step.c in self.ran
        twice = 0
        if place is not None:
            self.level[self.kind[place]] -= self.graph.storages[place].size
            self.taken[place] = k
        for j in node.outputs:
            if j in self.alive:
                twice += self.graph.storages[j].size     # the second copy goes at once
            else:
                self._add(k, j, again)
        self.ran.add(step.c)
        start = self.now
        self.now += kernel.time
        self._record(start, step, again, [("temporaries", twice + kernel.overhead)])

    def forget(self, k: int, j: int) -> None:
        self.spans.append((j, self.alive.pop(j), self.taken.get(j, k), self.again[j]))
        if j in self.taken:
            del self.taken[j]                           # its storage lives on under another name
        else:
            self.level[self.kind[j]] -= self.graph.storages[j].size
        self._record(self.now)

    def loss(self, k: int) -> None:
        before = sum(self.level.values())
        self.loss_at = k
        self.at_loss = set(self.alive)
        stays = min(self.graph.reserve_at_loss, LOSS_SCALARS)
        self.level["loss"] += stays
        for j in self.graph.output_grads:
            self._add(k, j, False)
        inside = before + self.graph.reserve_at_loss - sum(self.level.values())
        self._record(self.now, extra=[("loss", max(0, inside))])

    def close(self, end: int) -> None:
        for j, first in self.alive.items():
            self.spans.append((j, first, end, self.again[j]))
