"""Options without a solver: keep a set of data, recompute the rest when it is first missing.

Such an option is the answer if nothing needs a proof (keep nothing), a start for the solver, and the only
option of a block that is too large for the integer program, or that the program has no time for. Greedy sets
choose what is saved at the loss; evictions choose what is freed between the loss and the end of the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from rkmate.ilp.stages import BlockStages
from rkmate.ir.cd import missing_nodes
from rkmate.ir.schedule import Compute, Free, Loss, from_order
from rkmate.ir.simulate import simulate

PATIENCE = 12
"""Number of evictions in a row that may fail to lower the peak."""
STARTS = 12
"""Approximate number of greedy sets that the evictions start from."""


# -- What is saved ---------------------------------------------------------------------------------

def recompute_missing(stages: BlockStages, keep: Iterable[int], *, free_after_stage: bool = False,
                      ) -> tuple[int, ...]:
    """Return the backward order if, of all forward values, only `keep` (and values that need no memory) are
    saved.

    What is recomputed stays until its last use, so that each node runs again at most once. With
    `free_after_stage`, it goes at the end of its stage: less memory, more time.
    """
    graph = stages.graph
    at_loss = stages.free.union(keep)
    available = set(at_loss)
    stage_of = {stage.node: stage for stage in stages.stages}
    order: list[int] = []
    for b in graph.backward:
        stage = stage_of.get(b)
        if stage is not None:
            if free_after_stage:
                available = set(at_loss)
            runs = missing_nodes(graph, stage.need, available)
            for i in runs:
                available.update(graph.c[i].outputs)
            order += sorted(runs)
        order.append(b)
    return tuple(order)


def keep_nothing(stages: BlockStages) -> tuple[int, ...]:
    """Recompute everything that is not there for free; outputs are, as long as they are needed."""
    return recompute_missing(stages, stages.outputs)


def greedy_sets(stages: BlockStages) -> Iterator[frozenset[int]]:
    """Yield smaller and smaller sets of values to save, from what the backward reads down to nothing.

    Each step drops the data that frees most bytes per second of recomputation, or puts what it is
    made of in its place. Outputs are in every set: they are there at the loss.
    """
    if not stages.stages:
        return
    graph = stages.graph
    keep = {j for stage in stages.stages for j in stage.need} | stages.outputs
    runs: set[int] = set()
    yield frozenset(keep)
    while True:
        best: tuple[float, int, set[int], set[int]] | None = None
        for j in sorted(keep - stages.outputs):
            for instead in _instead(stages, j, keep):
                size = stages.size(j) - graph.bytes(instead)
                if size <= 0:
                    continue
                rest = (keep - {j}) | instead | stages.free
                extra = missing_nodes(graph, [j], rest, runs) if _read(stages, j, runs) else set()
                seconds = sum(graph.c[i].time for i in extra)
                if best is None or seconds / size < best[0]:
                    best = seconds / size, j, set(instead), extra
        if best is None:
            return
        _, j, instead_of_it, extra = best
        keep = (keep - {j}) | instead_of_it
        runs |= extra
        yield frozenset(keep)


def _instead(stages: BlockStages, j: int, keep: set[int]) -> list[frozenset[int]]:
    """Return the sets that may be kept instead of `j`: nothing, or the missing inputs of its producer."""
    producer = stages.graph.producer[j]
    assert producer is not None, "forward data that is not free has a producer"
    inputs = frozenset(stages.graph.c[producer].inputs) - stages.free - keep
    return [frozenset(), inputs] if inputs else [frozenset()]


def _read(stages: BlockStages, j: int, runs: set[int]) -> bool:
    """Return whether the backward, or a node that runs again, reads `j`."""
    loss = stages.graph.loss
    return any(i >= loss or i in runs for i in stages.graph.readers[j])


# -- What is freed in between ----------------------------------------------------------------------
#
# Lower peaks: as long as an order needs too much memory, carry one value less past its peak.


@dataclass
class _Carried:
    """Values that may be saved, and values that are freed before a stage."""

    stages: BlockStages
    keep: Collection[int]
    dropped: dict[int, set[int]] = field(default_factory=dict)
    """Stage -> forward data that is not carried into it."""

    def order(self) -> tuple[tuple[int, ...], list[int], list[set[int]]]:
        """Return the backward order, the stage of each of its computations (of an idle backward node: the
        stage that comes next), and what each stage finds before it recomputes."""
        graph = self.stages.graph
        position = {stage.node: t for t, stage in enumerate(self.stages.stages)}
        available = set(self.stages.free.union(self.keep))
        order: list[int] = []
        stage_of: list[int] = []
        found: list[set[int]] = []
        t = 0
        for b in graph.backward:
            if b in position:
                available -= self.dropped.get(t, set())
                found.append(set(available))
                runs = missing_nodes(graph, self.stages.stages[t].need, available)
                for i in runs:
                    available.update(graph.c[i].outputs)
                order += sorted(runs)
                stage_of += [t] * (len(runs) + 1)
                t += 1
            else:
                stage_of.append(t)
            order.append(b)
        return tuple(order), stage_of, found


def evictions(stages: BlockStages, keep: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Yield backward orders with lower and lower peaks, beginning with the order that saves `keep` and
    carries everything.

    At each order's peak, the value that costs least time per byte to recompute is freed, among the values
    that the computation at the peak does not touch and that only a later stage reads.
    """
    carried = _Carried(stages, keep)
    best: int | None = None
    tries = 0
    while tries < PATIENCE:
        order, stage_of, found = carried.order()
        peak, at, idle = _peak(stages, order)
        if best is None or peak < best:
            best, tries = peak, 0
            yield order
        else:
            tries += 1
        if at is None:
            return
        victim = _victim(stages, idle, stage_of[at], order, stage_of, found,
                         is_stage_node=order[at] == _node(stages, stage_of[at]))
        if victim is None:
            return
        t, j = victim
        carried.dropped.setdefault(t, set()).add(j)


def candidates(stages: BlockStages) -> Iterator[tuple[int, ...]]:
    """Yield backward orders that are worth simulating, the cheap ones first."""
    sets = []
    for keep in greedy_sets(stages):
        sets.append(keep)
        yield recompute_missing(stages, keep)
        yield recompute_missing(stages, keep, free_after_stage=True)
    # Fewest saved bytes first: time that runs out should leave the low peaks covered.
    for keep in sets[::-max(1, len(sets) // STARTS)]:
        yield from evictions(stages, keep)


def _node(stages: BlockStages, t: int) -> int:
    return stages.stages[t].node if t < len(stages.stages) else -1


def _peak(stages: BlockStages, order: tuple[int, ...]) -> tuple[int, int | None, set[int]]:
    """Return bytes of the backward's peak, the position in `order` where it stands (None: before the first
    computation), and the forward data that lies idle then."""
    graph = stages.graph
    schedule = from_order(graph, (*graph.forward, *order), graph.loss)
    timeline = simulate(graph, schedule).timeline
    start = schedule.steps.index(Loss())
    peak = max(timeline[start:])
    alive: set[int] = set()
    computed = -graph.loss
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            alive.discard(step.d)
        elif isinstance(step, Compute):
            node = graph.c[step.c]
            if k > start and timeline[k] == peak:
                forward = {j for j in alive if (i := graph.producer[j]) is not None
                           and i < graph.loss}
                return peak, computed, forward - set(node.inputs) - set(node.outputs)
            alive.update(node.outputs)
            computed += 1
    return peak, None, set()


def _victim(stages: BlockStages, idle: set[int], stage: int, order: tuple[int, ...],
            stage_of: list[int], found: list[set[int]], *,
            is_stage_node: bool) -> tuple[int, int] | None:
    """Return the value to free and the stage before which it is freed, as (stage, value); None if there is
    none."""
    graph = stages.graph
    first_read: dict[int, int] = {}
    for k in range(len(order) - 1, -1, -1):
        if stage_of[k] > stage or (stage_of[k] == stage and not is_stage_node):
            for j in graph.c[order[k]].inputs:
                first_read[j] = stage_of[k]
    best: tuple[float, int, int] | None = None
    for j in sorted(idle):
        t = first_read.get(j)
        if t is None or t <= stage or stages.size(j) == 0:
            continue
        runs = missing_nodes(graph, [j], found[t] - {j})
        seconds = sum(graph.c[i].time for i in runs)
        if best is None or seconds / stages.size(j) < best[0]:
            best = seconds / stages.size(j), t, j
    return None if best is None else (best[1], best[2])
