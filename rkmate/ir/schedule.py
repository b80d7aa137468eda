"""A schedule: the flat list of steps that a training step runs.

The order of the computations says it all: a storage is best freed right after its last reader
before the next time it is created. `from_order` derives the steps that free, so a planner only has to
decide what is computed when.

Steps are tuples, and equal where what is in them is. `Compute` is two numbers; the others carry a word of
their kind, so that two kinds are never equal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph, Kernel, missing_nodes


class Compute(NamedTuple):
    """Run a C node. Outputs that nobody needs (again) are dropped at once."""

    c: int
    kernel: int = 0
    """Number of the kernel: 0 is the C node's own, k is ``alternatives[k - 1]``."""


class Free(NamedTuple):
    """Free a D node's storage."""

    d: int
    kind: Literal["free"] = "free"


class Loss(NamedTuple):
    """The forward ends here: outputs go to the user, gradients come back."""

    kind: Literal["loss"] = "loss"


class CopyOut(NamedTuple):
    """Begin to copy a D node's storage away. It stays in memory until it leaves."""

    d: int
    kind: Literal["out"] = "out"


class Leave(NamedTuple):
    """Wait until a copy out has ended, and free the D node's storage."""

    d: int
    kind: Literal["leave"] = "leave"


class CopyIn(NamedTuple):
    """Make room for a D node that has been copied away, and begin to copy it back: its next reader waits for
    that. The copy that is away stays there to the end of the step."""

    d: int
    kind: Literal["in"] = "in"


class Start(NamedTuple):
    """Make room for the results of a collective, and begin it: the next `Compute` of its C node waits for its
    end. What it reads, and what it takes while it runs, stays in memory until then."""

    c: int
    kind: Literal["start"] = "start"


Step = Compute | Free | Loss | CopyOut | Leave | CopyIn | Start


@dataclass(frozen=True)
class Schedule:
    """Steps over the nodes of one `CDGraph`."""

    steps: tuple[Step, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The computations alone: C node indices, in the order in which they run."""
        return tuple([s.c for s in self.steps if type(s) is Compute])

    @property
    def loss_at(self) -> int:
        """How many computations run before the loss."""
        kinds = list(map(type, self.steps))
        return kinds[:kinds.index(Loss)].count(Compute) if Loss in kinds else kinds.count(Compute)

    def seconds(self, graph: CDGraph) -> float:
        """Sum of the times of all computations, in seconds: without waiting for copies."""
        # One by one, as the simulator adds them: from Python 3.12 on, `sum` rounds otherwise.
        seconds = 0.0
        for s in self.steps:
            if isinstance(s, Compute):
                seconds += kernel_of(graph, s).time
        return seconds

    @property
    def copied(self) -> frozenset[int]:
        """D nodes that are copied away."""
        return frozenset(s.d for s in self.steps if isinstance(s, CopyOut)) if self._has(CopyOut) \
            else frozenset()

    @property
    def starts(self) -> bool:
        """Whether a collective starts before it is waited for."""
        return self._has(Start)

    def _has(self, kind: type[Step]) -> bool:
        return kind in set(map(type, self.steps))       # much faster than to look at each step

    def waiting_at_once(self) -> Schedule:
        """Return the schedule in which each collective starts where it is waited for."""
        return Schedule(tuple(s for s in self.steps if not isinstance(s, Start))) if self.starts else self

    def recomputed(self) -> dict[int, int]:
        """Return how many times each C node runs again (only the nodes that do)."""
        counts: dict[int, int] = {}
        for i in self.order:
            counts[i] = counts.get(i, 0) + 1
        return {i: n - 1 for i, n in counts.items() if n > 1}


def kernel_of(graph: CDGraph, step: Compute) -> Kernel:
    """Return the kernel that a step runs. Raises `ScheduleError` when its C node has no such kernel."""
    node = graph.c[step.c]
    if not step.kernel:
        return Kernel(node.time, node.overhead)
    if not 0 < step.kernel <= len(node.alternatives):
        raise ScheduleError(f"{node.name} has no kernel {step.kernel}")
    return node.alternatives[step.kernel - 1]


def in_place_donor(graph: CDGraph, steps: Sequence[Step], k: int) -> int | None:
    """Return the D node whose storage the computation at step `k` takes for its output, if any.

    It does where an input that may be overwritten is freed right after it, and the output is
    not, or leaves for autograd. A kernel that is not the C node's own overwrites nothing.
    """
    step = steps[k]
    assert isinstance(step, Compute)
    node = graph.c[step.c]
    if not node.donors or step.kernel:
        return None
    gone = freed_after(steps, k)
    if node.outputs[0] in gone and node.outputs[0] not in graph.releases:
        return None
    return next((j for j in node.donors if j in gone), None)


def freed_after(steps: Sequence[Step], k: int) -> set[int]:
    """Return the D nodes that are freed right after step `k`."""
    gone: set[int] = set()
    k += 1
    while k < len(steps):
        step = steps[k]
        if not isinstance(step, Free):
            break
        gone.add(step.d)
        k += 1
    return gone


def save_all(graph: CDGraph) -> Schedule:
    """Return the schedule that runs every computation once, in the graph's order, and frees nothing that is
    needed again."""
    return from_order(graph, range(len(graph.c)), graph.loss)


def from_order(graph: CDGraph, order: Sequence[int] | Iterable[int], loss_at: int) -> Schedule:
    """Return the schedule that runs `order` and frees every storage as early as possible.

    `loss_at`: how many of the computations run before the loss. D nodes of `graph.held` are never freed. What
    a C node decides is not freed either: that it would run again in `order` is left out. What the user wishes
    holds, whatever `order` says: a node of `graph.once` does not run again, and data of `graph.forgotten` is
    made again before it is read after the loss. D nodes of `graph.outputs` are kept until the loss, those of
    `graph.input_grads` to the end, parameter gradients (`graph.releases`) until they exit. Raises
    `ScheduleError` when a computation reads what is not in memory.
    """
    order, loss_at = as_wished(graph, list(order), loss_at)
    nodes, fixed = [(c.inputs, c.outputs) for c in graph.c], set(graph.inputs)
    # Walk backwards: what is read later says where each D node dies.
    stays = [False] * len(graph.d)       # somebody holds it
    for j in (*graph.held, *graph.decided, *fixed):
        stays[j] = True
    later = [False] * len(graph.d)       # it is read later, before it is made again
    for j in graph.input_grads:
        later[j] = True
    dies: dict[int, list[int]] = {}      # after computation k
    at_loss: list[int] = []
    exit_after: dict[int, list[int]] = {}
    for j, i in graph.releases.items():
        exit_after.setdefault(i, []).append(j)
    for k in range(len(order) - 1, -1, -1):
        if k + 1 == loss_at:
            unread = [j for j in graph.output_grads if not (later[j] or stays[j])]
            for j in graph.outputs:
                if not (later[j] or stays[j]):
                    later[j] = True
                    at_loss.append(j)
            at_loss += unread
            for j in graph.output_grads:
                later[j] = False
        i = order[k]
        inputs, outputs = nodes[i]
        gone: list[int] = []
        for j in exit_after.get(i, ()):
            if not (later[j] or stays[j]):
                later[j] = True
                gone.append(j)
        for j in outputs:
            if later[j]:
                later[j] = False
            elif not stays[j]:
                gone.append(j)
        for j in inputs:
            if not later[j]:
                later[j] = True
                if not stays[j]:
                    gone.append(j)
        if gone:
            dies[k] = gone
    there = {*fixed, *graph.output_grads} if loss_at == 0 else fixed
    if any(later) and not all(j in there for j, read in enumerate(later) if read):
        _check_reads(graph, order, loss_at)
    _make_known(max(len(graph.c), len(graph.d)))
    steps: list[Step] = []
    if loss_at == 0:
        steps.append(Loss())
    for k, i in enumerate(order):
        steps.append(_COMPUTES[i])
        if k in dies:
            steps += [_FREES[j] for j in dies[k]]
        if k + 1 == loss_at:
            steps.append(Loss())
            steps += [_FREES[j] for j in at_loss]
    return Schedule(tuple(steps))


_COMPUTES: list[Compute] = []
_FREES: list[Free] = []
"""Steps by their number: those of one number are one object, in whatever schedule."""


def _make_known(count: int) -> None:
    with _growing:
        for i in range(len(_FREES), count):
            _COMPUTES.append(Compute(i))
            _FREES.append(Free(i))


_growing = threading.Lock()


def _check_reads(graph: CDGraph, order: Sequence[int], loss_at: int) -> None:
    """Raise `ScheduleError` where a computation reads what nothing before it made."""
    made = {*graph.inputs, *(graph.output_grads if loss_at == 0 else ())}
    for k, i in enumerate(order):
        missing = [j for j in graph.c[i].inputs if j not in made]
        if missing:
            names = ", ".join(graph.d[j].name for j in missing)
            raise ScheduleError(f"step {k} ({graph.c[i].name}) reads {names}, which is not in memory")
        made.update(graph.c[i].outputs)
        if k + 1 == loss_at:
            made.update(graph.output_grads)


def as_wished(graph: CDGraph, order: list[int], loss_at: int) -> tuple[list[int], int]:
    """Return an order of computations, and how many run before the loss, after what `from_order` leaves out
    and adds: second runs of what decides or is kept, and runs of what the user wants made again."""
    order, loss_at = _decided_once(graph, order, loss_at)
    if graph.forgotten:
        order = [*order[:loss_at], *_made_again(graph, order[loss_at:])]
    return order, loss_at


def _decided_once(graph: CDGraph, order: list[int], loss_at: int) -> tuple[list[int], int]:
    """Return an order without the further runs of C nodes that decide, or whose results the user wants kept,
    and how many of it run before the loss."""
    if not (graph.decided or graph.once):
        return order, loss_at
    ran: set[int] = set()
    kept: list[int] = []
    before = loss_at
    for k, i in enumerate(order):
        if i in ran and (graph.c[i].decides or i in graph.once):
            before -= k < loss_at
            continue
        ran.add(i)
        kept.append(i)
    return kept, before


def _made_again(graph: CDGraph, order: Sequence[int]) -> list[int]:
    """Return an order of what runs after the loss, in which data of `graph.forgotten` is made again before it
    is read."""
    there = set(range(len(graph.d))) - graph.forgotten
    result: list[int] = []
    for i in order:
        for k in (*sorted(missing_nodes(graph, graph.c[i].inputs, there)), i):
            result.append(k)
            there.update(graph.c[k].outputs)
    return result


def unmet_wishes(graph: CDGraph, schedule: Schedule) -> list[str]:
    """Return the names of data for which a schedule does not do what the user wishes."""
    unmet: list[str] = []
    ran: set[int] = set()
    there: set[int] = set()
    for step in schedule.steps:
        if isinstance(step, Compute):
            if step.c in ran and step.c in graph.once:
                unmet.append(graph.c[step.c].name)
            ran.add(step.c)
            there.update(graph.c[step.c].outputs)
        elif isinstance(step, (Free, Leave)):
            there.discard(step.d)
        elif isinstance(step, Loss):
            unmet += [graph.d[j].name for j in sorted(graph.forgotten & there)]
    return unmet
