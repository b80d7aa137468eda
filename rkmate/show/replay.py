"""Replay a plan's schedule with names: what is in memory at each step, of which kind, and for which part of
the model.

The levels and the clocks are the simulator's own: the stacked kinds add up to its timeline, step by step. In
words, tables and pictures, an operation is named by the module of the user's model, then by itself (`label`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from rkmate.errors import ScheduleError
from rkmate.ir.cd import Kernel
from rkmate.ir.kernels import choose_kernels
from rkmate.ir.link import Clocks
from rkmate.ir.plan import PlanData
from rkmate.ir.schedule import (
    Compute,
    CopyIn,
    CopyOut,
    Free,
    Leave,
    Schedule,
    Start,
    in_place_donor,
    kernel_of,
    save_all,
)
from rkmate.ir.simulate import LOSS_SCALARS, Simulation, simulate
from rkmate.ir.summary import GraphSummary

Kind = Literal["kept", "back", "recomputed", "gradients", "buffers", "temporaries", "loss"]
KINDS: tuple[Kind, ...] = ("kept", "back", "recomputed", "gradients", "buffers", "temporaries", "loss")
KIND_NAMES: dict[Kind, str] = {
    "kept": "kept activations", "back": "activations copied back", "recomputed": "recomputed activations",
    "gradients": "gradients", "buffers": "buffers for copies and collectives",
    "temporaries": "temporaries of operations", "loss": "the caller's loss"}
_OF_NOBODY: tuple[Kind, ...] = ("buffers", "loss")
"""Kinds whose bytes are no storage's."""


@dataclass(frozen=True)
class Tensor:
    """A storage in memory at a moment."""

    name: str
    path: str
    """Module of the user's model."""
    operation: str
    bytes: int
    kind: Kind


@dataclass(frozen=True)
class Moment:
    """A step of the schedule."""

    start: float
    """Seconds since the step's begin; what it waits for copies is over."""
    end: float
    computation: int | None
    """The C node that runs; None for other steps."""
    again: bool
    """The computation has run before."""
    kernel: int
    """Number of the kernel: 0 is the computation's own, the others have fewer and larger parts."""
    bytes: tuple[int, ...]
    """Bytes by kind, in the order of `KINDS`: while a computation runs, or after another step."""
    waited: float = 0.0
    """Seconds before `start` in which it waited for copies."""

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return sum(self.bytes)

    @property
    def after(self) -> tuple[int, ...]:
        """By kind, when it is over, and before anything is freed."""
        at = KINDS.index("temporaries")
        return (*self.bytes[:at], 0, *self.bytes[at + 1:])


class Span(NamedTuple):
    """Moments during which a storage is in memory."""

    storage: int
    first: int
    """Moment."""
    last: int
    """The moment after the last."""
    kind: Kind


@dataclass(frozen=True)
class Occupancy:
    """A whole training step: what occupies memory at each moment."""

    graph: GraphSummary
    schedule: Schedule
    simulation: Simulation
    """Result of the simulator, including the times of copies."""
    moments: tuple[Moment, ...]
    loss_at: int
    """Index of the loss among the moments."""
    alive_at_peak: tuple[tuple[int, Kind], ...]
    """Storages in memory at the peak."""
    alive_at_loss: frozenset[int]
    """Storages that the forward leaves to the backward, in memory."""
    away_at_loss: frozenset[int]
    """Storages that the forward leaves to the backward in another place."""
    spans: tuple[Span, ...]
    """Spans of each storage in memory."""
    absences: tuple[tuple[int, int, int], ...]
    """(storage, first moment, moment after the last): when each that comes back is away alone."""

    @property
    def peak_at(self) -> int:
        """Index of the moment of the peak."""
        return self.simulation.peak_at

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.moments[self.peak_at].total

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.moments[-1].end

    @property
    def loss_seconds(self) -> float:
        """When the forward ends."""
        return self.moments[self.loss_at].end

    @cached_property
    def copied(self) -> frozenset[int]:
        """Storages that are copied away."""
        return self.schedule.copied

    @cached_property
    def peak_tensors(self) -> tuple[Tensor, ...]:
        """Tensors in memory at the peak, the largest first; of equal sizes, temporaries last."""
        found = [self._tensor(j, kind) for j, kind in self.alive_at_peak
                 if self.graph.cd.d[j].size]
        moment = self.moments[self.peak_at]
        by_kind = dict(zip(KINDS, moment.bytes, strict=True))
        if by_kind["temporaries"]:
            at = moment.computation or 0
            c = self.graph.computations[at]
            found.append(Tensor(f"inside {self.graph.cd.c[at].name}", c.path, c.operation,
                                by_kind["temporaries"], "temporaries"))
        found += [Tensor(KIND_NAMES[kind], "", "", by_kind[kind], kind)
                  for kind in _OF_NOBODY if by_kind[kind]]
        return tuple(sorted(found, key=lambda t: -t.bytes))

    def _tensor(self, j: int, kind: Kind) -> Tensor:
        d, maker = self.graph.cd.d[j], self.graph.cd.producer[j]
        if maker is None:
            return Tensor(d.name, "", "gradient of an output", d.size, kind)
        c = self.graph.computations[maker]
        return Tensor(d.name, c.path, c.operation, d.size, kind)

    @cached_property
    def recomputed_seconds(self) -> dict[int, float]:
        """Per computation that runs again: the time of its further runs."""
        result: dict[int, float] = {}
        for m in self.moments:
            if m.computation is not None and m.again:
                result[m.computation] = result.get(m.computation, 0.0) + m.end - m.start
        return result

    def block_bytes(self, block: int) -> list[int]:
        """Return bytes of a block's forward storages at each moment."""
        def mine(j: int) -> bool:
            maker = self.graph.cd.producer[j]
            return maker is not None and maker < self.graph.cd.loss \
                and self.graph.computations[maker].block == block
        return self._levels((s.storage, s.first, s.last) for s in self.spans if mine(s.storage))

    def away_bytes(self) -> list[int]:
        """Return bytes that are away, and not in memory, at each moment: of what comes back."""
        return self._levels(self.absences)

    def _levels(self, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        change = [0] * (len(self.moments) + 1)
        for j, first, last in spans:
            change[first] += self.graph.cd.d[j].size
            change[last] -= self.graph.cd.d[j].size
        level, levels = 0, []
        for c in change[:-1]:
            level += c
            levels.append(level)
        return levels


def replay(plan: PlanData) -> Occupancy:
    """Return the schedule of a plan. Raises `ScheduleError` when it does not run."""
    return replay_schedule(plan.graph, plan.schedule)


def replay_baseline(plan: PlanData) -> Occupancy:
    """Replay the model's step without rematerialization."""
    cd = plan.graph.cd
    return replay_schedule(plan.graph, choose_kernels(cd, save_all(cd)))


def replay_schedule(graph: GraphSummary, schedule: Schedule) -> Occupancy:
    """Return the occupancy of a schedule. Raises `ScheduleError` if the schedule does not run."""
    result = simulate(graph.cd, schedule)
    walk = _Walk(graph, schedule)
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            walk.compute(k, step, kernel_of(graph.cd, step),
                         in_place_donor(graph.cd, schedule.steps, k))
        elif isinstance(step, Free):
            walk.forget(k, step.d)
        elif isinstance(step, CopyOut):
            walk.copy_out(step.d)
        elif isinstance(step, Leave):
            walk.leave(k, step.d)
        elif isinstance(step, CopyIn):
            walk.copy_in(k, step.d)
        elif isinstance(step, Start):
            walk.start(k, step.c)
        else:
            walk.loss(k)
        if walk.moments[-1].total != result.timeline[k]:
            raise ScheduleError(f"step {k}: {walk.moments[-1].total:,} bytes by kind, "
                                f"{result.timeline[k]:,} in the simulator")
        if k == result.peak_at:
            alive_at_peak = tuple((j, walk.kind[j]) for j in sorted(walk.alive)
                                  if j not in walk.taken)
    walk.close(len(schedule.steps))
    return Occupancy(graph, schedule, result, tuple(walk.moments), walk.loss_at, alive_at_peak,
                     frozenset(walk.at_loss), frozenset(walk.away_at_loss), tuple(walk.spans),
                     tuple(walk.absences))


class _Walk:
    """The state between two steps."""

    def __init__(self, graph: GraphSummary, schedule: Schedule) -> None:
        self.cd = graph.cd
        self.clocks = Clocks(graph.cd.link)
        self.alive: dict[int, int] = {}                 # storage -> moment of its creation
        self.kind: dict[int, Kind] = {}
        self.level: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        if graph.cd.link is not None and schedule.copied:
            self.level["buffers"] = graph.cd.link.buffer_bytes
        self.taken: dict[int, int] = {}                 # overwritten storage -> moment
        self.sent: set[int] = set()
        self.gone: dict[int, int] = {}                  # storage that is away alone -> since which moment
        self.ran: set[int] = set()
        self.running: set[int] = set()                  # collectives that were started
        self.moments: list[Moment] = []
        self.spans: list[Span] = []
        self.absences: list[tuple[int, int, int]] = []
        self.loss_at = 0
        self.at_loss: set[int] = set()
        self.away_at_loss: set[int] = set()

    def _add(self, k: int, j: int, kind: Kind) -> None:
        self.kind[j] = "gradients" if self.cd.d[j].kind == "grad" else kind
        self.alive[j] = k
        self.level[self.kind[j]] += self.cd.d[j].size

    def _record(self, begin: float, start: float, step: Compute | None = None, again: bool = False,
                extra: Iterable[tuple[Kind, int]] = ()) -> None:
        level = dict(self.level)
        for kind, n in extra:
            level[kind] += n
        self.moments.append(Moment(start, self.clocks.now, step.c if step else None, again,
                                   step.kernel if step else 0, tuple(level[kind] for kind in KINDS),
                                   start - begin))

    def _record_at_once(self, extra: Iterable[tuple[Kind, int]] = ()) -> None:
        self._record(self.clocks.now, self.clocks.now, extra=extra)

    def start(self, k: int, c: int) -> None:
        node = self.cd.c[c]
        for j in node.outputs:
            self._add(k, j, "recomputed" if c in self.ran else "kept")
        self.level["buffers"] += node.overhead
        self.running.add(c)
        self.clocks.start(c, node.time)
        self._record_at_once()

    def wait(self, step: Compute) -> None:
        node, begin = self.cd.c[step.c], self.clocks.now
        self.clocks.exchange(step.c, node.time)
        self._record(begin, self.clocks.now, step, step.c in self.ran)
        self.level["buffers"] -= node.overhead
        self.running.discard(step.c)
        self.ran.add(step.c)

    def compute(self, k: int, step: Compute, kernel: Kernel, place: int | None) -> None:
        if step.c in self.running:
            self.wait(step)
            return
        node = self.cd.c[step.c]
        again = step.c in self.ran
        begin = self.clocks.now
        for j in node.inputs:
            self.clocks.arrive(j)
        twice = 0
        if place is not None:
            self.level[self.kind[place]] -= self.cd.d[place].size
            self.taken[place] = k
        for j in node.outputs:
            if j in self.alive:
                twice += self.cd.d[j].size     # the second copy goes at once
            else:
                self.gone.pop(j, None)
                self._add(k, j, "recomputed" if again else "kept")
        self.ran.add(step.c)
        start = self.clocks.now
        self.clocks.run(step.c, kernel.time, node.exchanges)
        self._record(begin, start, step, again, [("temporaries", twice + kernel.overhead)])

    def _end(self, k: int, j: int) -> None:
        self.spans.append(Span(j, self.alive.pop(j), self.taken.get(j, k), self.kind[j]))

    def forget(self, k: int, j: int) -> None:
        self._end(k, j)
        if j in self.taken:
            del self.taken[j]                           # its storage lives on under another name
        else:
            self.level[self.kind[j]] -= self.cd.d[j].size
        if j in self.sent:
            self.gone[j] = k
        self._record_at_once()

    def copy_out(self, j: int) -> None:
        self.clocks.copy_out(j, self.cd.d[j].size)
        self.sent.add(j)
        self._record_at_once()

    def leave(self, k: int, j: int) -> None:
        begin = self.clocks.now
        self.clocks.leave(j)
        self._end(k, j)
        self.level[self.kind[j]] -= self.cd.d[j].size
        self.gone[j] = k
        self._record(begin, self.clocks.now)

    def copy_in(self, k: int, j: int) -> None:
        self.clocks.copy_in(j, self.cd.d[j].size)
        self.absences.append((j, self.gone.pop(j), k))
        self._add(k, j, "back")
        self._record_at_once()

    def loss(self, k: int) -> None:
        before = sum(self.level.values())
        self.loss_at = k
        self.at_loss = set(self.alive)
        self.away_at_loss = set(self.gone)
        stays = min(self.cd.reserve_at_loss, LOSS_SCALARS)
        self.level["loss"] += stays
        for j in self.cd.output_grads:
            self._add(k, j, "gradients")
        inside = before + self.cd.reserve_at_loss - sum(self.level.values())
        self._record_at_once([("loss", max(0, inside))])

    def close(self, end: int) -> None:
        for j, first in self.alive.items():
            self.spans.append(Span(j, first, end, self.kind[j]))


WHOLE = "the model itself"
"""Path of an operation that belongs to no submodule."""


def label(path: str, operation: str) -> str:
    """Return a label, ``encoder.layer.3.attention: softmax``; only the operation if it belongs to the model
    itself."""
    return f"{path}: {operation}" if path and operation else path or operation


def label_lines(path: str, operation: str) -> tuple[str, ...]:
    """Return `label` in two lines, for the nodes of a graph."""
    return (f"{path}:", operation) if path else (operation,)


def short_path(path: str, within: str) -> str:
    """Return a module path relative to another one's, which is named next to it."""
    if path == within:
        return ""
    return path.removeprefix(f"{within}.") if within else path


def shortened(text: str, length: int) -> str:
    """Shorten a text to `length` characters. The end stays, because there module paths differ."""
    return text if len(text) <= length else f"...{text[3 - length:]}"
