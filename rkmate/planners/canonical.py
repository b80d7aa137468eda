"""Plain graphs, sequences of lower sets of them, and the order of computations that such a sequence means.

`Dag` is the language of Kusumoto et al. (2019), section 2: V is the set of intermediate variables (inputs and
parameters left out), T_v the time to compute v, M_v its size. Sets of nodes are Python integers, one bit a
node.

The canonical strategy (section 3) keeps the boundary of each lower set in the forward. When the backward
reaches a block, it computes the block's other nodes again. What of them is freed when is left to liveness:
the schedule frees every value after its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rkmate.errors import GraphError, WishError
from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.schedule import Compute, Free, Schedule, Step, from_order


@dataclass(frozen=True)
class Dag:
    """Nodes 0 .. n-1 in a topological order."""

    times: tuple[float, ...]
    """Seconds to compute each node."""
    sizes: tuple[int, ...]
    """Bytes of each node's value."""
    edges: tuple[tuple[int, int], ...]
    """(v, w): computing w reads v; v < w."""

    def __post_init__(self) -> None:
        if len(self.times) != len(self.sizes):
            raise GraphError(f"{len(self.times)} times for {len(self.sizes)} sizes")
        for v, w in self.edges:
            if not 0 <= v < w < len(self.times):
                raise GraphError(f"edge ({v}, {w}): nodes must be numbered in a topological order")

    def __len__(self) -> int:
        return len(self.times)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Return, for each node, the nodes that read it."""
        result = [0] * len(self)
        for v, w in self.edges:
            result[v] |= 1 << w
        return tuple(result)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Return, for each node, the nodes that it reads."""
        result = [0] * len(self)
        for v, w in self.edges:
            result[w] |= 1 << v
        return tuple(result)

    def boundary(self, lower: int) -> int:
        """Return the members of a lower set that nodes outside of it read."""
        return sum(1 << v for v in members(lower) if self.after[v] & ~lower)

    def readers(self, nodes: int) -> int:
        """Return delta+: all nodes that read one of `nodes`."""
        result = 0
        for v in members(nodes):
            result |= self.after[v]
        return result

    def read(self, nodes: int) -> int:
        """Return delta-: all nodes that one of `nodes` reads."""
        result = 0
        for v in members(nodes):
            result |= self.before[v]
        return result

    def time(self, nodes: int) -> float:
        """Return T(S), in seconds."""
        return sum(self.times[v] for v in members(nodes))

    def bytes(self, nodes: int) -> int:
        """Return M(S), in bytes."""
        return sum(self.sizes[v] for v in members(nodes))


def members(nodes: int) -> list[int]:
    """Return the nodes of a set, in order."""
    result = []
    while nodes:
        low = nodes & -nodes
        result.append(low.bit_length() - 1)
        nodes ^= low
    return result


def forward_dag(graph: CDGraph) -> Dag:
    """Return the forward of a CD graph: one node a computation, as large as its outputs.

    What the user holds counts 0 bytes: no strategy can free it.
    """
    held = set(graph.held)
    edges = sorted({(p, i) for i in graph.forward for j in graph.c[i].inputs
                    if (p := graph.producer[j]) is not None})
    return Dag(tuple(graph.c[i].time for i in graph.forward),
               tuple(graph.bytes(j for j in graph.c[i].outputs if j not in held)
                     for i in graph.forward), tuple(edges))


@dataclass(frozen=True)
class TrainedForward:
    """The forward of a captured model without what is computed once and kept (masks, positions).

    Such constants are inputs in the paper's sense. As nodes they would cross every cut, double the
    number of lower sets each, and leave no place where a single value is alive.
    """

    dag: Dag
    """Graph of the values that depend on trained values."""
    nodes: tuple[int, ...]
    """For each node of `dag`, its C node."""
    whole: Dag
    """The whole forward, node for node."""

    def lift(self, sets: Sequence[int]) -> tuple[int, ...]:
        """Lower sets of `dag` as lower sets of `whole`: the constants belong to all of them."""
        constants = (1 << len(self.whole)) - 1
        for c in self.nodes:
            constants &= ~(1 << c)
        return tuple(sum((1 << self.nodes[v] for v in members(lower)), constants) for lower in sets)


def trained_forward(graph: CDGraph, block_c: Iterable[Iterable[int]]) -> TrainedForward:
    """Leave out of the forward the C nodes that belong to no block: they depend on no block's."""
    whole = forward_dag(graph)
    nodes = sorted({c for block in block_c for c in block if c < graph.loss})
    place = {c: v for v, c in enumerate(nodes)}
    edges = tuple((place[v], place[w]) for v, w in whole.edges if v in place and w in place)
    return TrainedForward(Dag(tuple(whole.times[c] for c in nodes),
                              tuple(whole.sizes[c] for c in nodes), edges), tuple(nodes), whole)


@dataclass(frozen=True)
class Canonical:
    """A canonical strategy, ready to run."""

    order: tuple[int, ...]
    """C nodes."""
    loss_at: int
    """Number of computations before the loss."""
    part: tuple[int, ...]
    """For each entry of `order`, which forward or backward of a block it belongs to, counted up."""


def cached(dag: Dag, sets: Sequence[int]) -> int:
    """Return U_k: the nodes kept in the forward, the union of all boundaries."""
    result = 0
    for lower in sets:
        result |= dag.boundary(lower)
    return result


def canonical(graph: CDGraph, dag: Dag, sets: Sequence[int], *,
              keep_last: bool = False, by_blocks: bool = True) -> Canonical:
    """Return the order of computations of a sequence of lower sets.

    `dag` is the forward of `graph`, node for node (`rkmate.planners.canonical.forward_dag`). `keep_last`:
    the last block's values stay for its backward, which comes next, instead of being computed
    twice in a row. `by_blocks`: the forward runs block after block, as in the paper; otherwise in
    the graph's order, so that random numbers are drawn as without a plan. The backward runs in the
    graph's order, and a block's backward begins where a node reads values no later than the block's.
    Nodes of a block that no backward reads, directly or through others, are not computed again.
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
    for b in graph.backward:
        place = min(place, max((block[made] for j in graph.c[b].inputs
                                if (made := graph.producer[j]) is not None and made < graph.loss),
                               default=place))
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


def without_liveness(graph: CDGraph, strategy: Canonical) -> Schedule:
    """Return the schedule that frees at the end of each block's forward and backward only. Raises `WishError`
    if the user wishes data to be kept or computed again."""
    if graph.once or graph.forgotten:
        raise WishError("a schedule without liveness does not follow what Settings(pins=...), rkmate.keep or "
                        "rkmate.recompute say: leave them out, or take another planner")
    steps: list[Step] = []
    waiting: list[Step] = []
    k = 0
    for step in from_order(graph, strategy.order, strategy.loss_at).steps:
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


def _wanted(graph: CDGraph, there: set[int]) -> set[int]:
    """Return forward nodes not kept that some backward node needs, directly or through others."""
    seen = set(there)
    for b in graph.backward:
        seen |= missing_nodes(graph, graph.c[b].inputs, known=seen)
    return seen - there
