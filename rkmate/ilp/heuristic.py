"""Options without a solver: keep a set of data, recompute the rest when it is first missing.

They answer what needs no proof (keep nothing), give the solver something to start from, and are all
there is for a block that the time limit is too short for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rkmate.ilp.stages import BlockStages
from rkmate.ir.recompute import missing_nodes


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
