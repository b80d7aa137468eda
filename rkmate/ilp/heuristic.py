"""Options without a solver: keep a set of data, recompute the rest when it is first missing.

They answer what needs no proof (save everything, keep nothing), give the solver something to start
from, and are all there is for a block that the time limit is too short for.
"""

from __future__ import annotations

from collections.abc import Collection

from rkmate.ilp.stages import Stages


def recompute_missing(stages: Stages, keep: Collection[int], *, again: bool = False,
                      ) -> tuple[int, ...]:
    """The backward order when of all forward data only `keep` (and what is free) is saved.

    What is recomputed stays until its last use, so that each node runs again at most once. With
    `again`, it goes at the end of its stage: less memory, more time.
    """
    graph = stages.graph
    producer = graph.producer
    available = {j for j in keep} | stages.free
    at_loss = frozenset(available)
    stage_of = {stage.node: stage for stage in stages.stages}
    order: list[int] = []
    for b in graph.backward:
        stage = stage_of.get(b)
        if stage is not None:
            if again:
                available = set(at_loss)
            runs: set[int] = set()
            stack = [j for j in stage.need if j not in available]
            while stack:
                i = producer[stack.pop()]
                assert i is not None
                if i not in runs:
                    runs.add(i)
                    stack += [j for j in graph.c[i].inputs if j not in available]
            for i in runs:
                available.update(graph.c[i].outputs)
            order += sorted(runs)
        order.append(b)
    return tuple(order)


def keep_nothing(stages: Stages) -> tuple[int, ...]:
    """Recompute everything that is not there for free; outputs are, as long as they are needed."""
    return recompute_missing(stages, stages.outputs)
