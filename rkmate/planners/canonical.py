"""From a sequence of lower sets to an order of computations (Kusumoto et al. 2019, section 3).

The canonical strategy keeps the boundary of each lower set in the forward. When the backward
reaches a block, it computes the block's other nodes again. What of them is freed when is left
to liveness: the schedule frees every value after its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rkmate.ir.cd import CDGraph
from rkmate.ir.recompute import missing_nodes
from rkmate.ir.schedule import Compute, Free, Schedule, Step, from_order
from rkmate.ir.simulate import simulate
from rkmate.planners.dag import Dag, members


@dataclass(frozen=True)
class Canonical:
    """A canonical strategy, ready to run."""

    order: tuple[int, ...]
    """C nodes."""
    loss_at: int
    """How many of them run before the loss."""
    part: tuple[int, ...]
    """For each entry of `order`, which forward or backward of a block it belongs to, counted up."""


def cached(dag: Dag, sets: Sequence[int]) -> int:
    """U_k: the nodes kept in the forward, the union of all boundaries."""
    result = 0
    for lower in sets:
        result |= dag.boundary(lower)
    return result


def canonical(graph: CDGraph, dag: Dag, sets: Sequence[int], *,
              keep_last: bool = False, by_blocks: bool = True,
              origin: Sequence[int] | None = None) -> Canonical:
    """The order of computations of a sequence of lower sets.

    `dag` is the forward of `graph`, node for node (`rkmate.planners.dag.forward_dag`). `keep_last`:
    the last block's values stay for its backward, which comes next, instead of being computed
    twice in a row. `by_blocks`: the forward runs block after block, as in the paper; otherwise in
    the graph's order, so that random numbers are drawn as without a plan. `origin`: for each
    backward node, in order, the forward node whose block it belongs to, and the backward, too, runs
    block after block; without it, it runs in the graph's order, and a block's backward begins where
    a node reads values no later than the block's. Nodes of a block that no backward reads,
    directly or through others, are not computed again.
    """
    kept = cached(dag, sets)
    if keep_last:
        kept |= sets[-1] & ~(sets[-2] if len(sets) > 1 else 0)
    block = [0] * len(dag)
    blocks = []
    before = 0
    for k, lower in enumerate(sets):
        blocks.append(members(lower & ~before))
        for v in blocks[-1]:
            block[v] = k
        before = lower
    there = set(members(kept))
    order = [v for nodes in blocks for v in nodes] if by_blocks else list(graph.forward)
    part = [block[v] for v in order]
    wanted = _wanted(graph, there)
    place = len(blocks)      # the block whose backward runs
    backward = list(graph.backward)
    if origin is not None:
        backward.sort(key=lambda b: -block[origin[b - graph.loss]])
    for b in backward:
        if origin is not None:
            here = block[origin[b - graph.loss]]
        else:
            here = max((block[made] for j in graph.c[b].inputs
                        if (made := graph.producer[j]) is not None and made < graph.loss),
                       default=place)
        place = min(place, here)
        missing = missing_nodes(graph, graph.c[b].inputs, known=there)
        while missing:
            k = max(block[v] for v in missing)
            recomputed = [v for v in blocks[k] if v not in there and v in wanted]
            order += recomputed
            part += [2 * len(blocks) - place] * len(recomputed)
            there.update(recomputed)
            missing = missing_nodes(graph, graph.c[b].inputs, known=there)
        order.append(b)
        part.append(2 * len(blocks) - place)
    return Canonical(tuple(order), graph.loss, tuple(part))


def without_liveness(graph: CDGraph, strategy: Canonical, pinned: Iterable[int] = ()) -> Schedule:
    """The schedule that frees at the end of each block's forward and backward only."""
    steps: list[Step] = []
    waiting: list[Step] = []
    k = 0
    for step in from_order(graph, strategy.order, strategy.loss_at, pinned).steps:
        if isinstance(step, Free):
            waiting.append(step)
            continue
        if isinstance(step, Compute):
            if k and strategy.part[k] != strategy.part[k - 1]:
                steps += waiting
                waiting = []
            k += 1
        steps.append(step)
    return Schedule((*steps, *waiting))


def plain_peak(dag: Dag, sets: Sequence[int], *, liveness: bool = True) -> int:
    """Simulated peak, in bytes, of a strategy on a plain graph and its backward
    (`Dag.training_graph`), with liveness analysis or without. Equation (2) is an upper bound."""
    graph = dag.training_graph()
    strategy = canonical(graph, dag, sets, origin=range(len(dag) - 1, -1, -1))
    if liveness:
        return simulate(graph, from_order(graph, strategy.order, strategy.loss_at)).peak
    return simulate(graph, without_liveness(graph, strategy)).peak


def _wanted(graph: CDGraph, there: set[int]) -> set[int]:
    """Forward nodes not kept that some backward node needs, directly or through others."""
    seen = set(there)
    for b in graph.backward:
        seen |= missing_nodes(graph, graph.c[b].inputs, known=seen)
    return seen - there
