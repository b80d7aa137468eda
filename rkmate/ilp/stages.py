"""A block's graph as the integer program sees it: the stages of its backward.

Backward nodes run once, in index order, so all that is left to choose is which forward data is
there when, and what is recomputed before which backward node. Only a backward node that reads
forward data opens a *stage* (Rockmate, appendix B.1, has one for each node): recomputation happens
right before such a node. Gradients live from their producer to their last reader whatever is
chosen: they are constants here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.gradients import gradient_memory


@dataclass(frozen=True)
class Stage:
    """Recomputations, then one backward node that reads forward data."""

    node: int
    """The backward C node that ends the stage."""
    need: tuple[int, ...]
    """Forward D nodes that it reads."""
    recomputable: tuple[int, ...]
    """Forward C nodes that may run again in this stage, ascending."""
    carried: tuple[int, ...]
    """Forward D nodes that are worth carrying into this stage, ascending."""
    before: int
    """Bytes of gradients alive while the stage recomputes."""
    during: int
    """Bytes of gradients and temporaries while ``node`` runs, its outputs included, a gradient that
    the output overwrites left out."""
    donors: tuple[int, ...]
    """Needed forward data whose place the output of ``node`` takes if it dies there; empty where a
    gradient's place is taken whatever is chosen."""
    idle: int
    """Bytes at the hungriest backward node between the previous stage and this one; at least ``before``."""


@dataclass(frozen=True)
class BlockStages:
    """Everything that the integer program needs to know about a graph."""

    graph: CDGraph
    stages: tuple[Stage, ...]
    free: frozenset[int]
    """Forward D nodes that cost nothing: held outside, or of size 0. Always kept."""
    outputs: frozenset[int]
    """Forward D nodes that are there at the loss whatever is saved."""
    forward_base: tuple[int, ...]
    """For each forward C node: bytes while it runs in the forward if nothing is saved."""
    forward_dead: tuple[tuple[int, ...], ...]
    """For each forward C node: D nodes of stage 0 that count on top of ``forward_base`` if they are saved:
    those that are dead by then, and one that the node's output would overwrite."""
    forward_donors: tuple[tuple[int, ...], ...]
    """For each forward C node: D nodes one of which the output overwrites, unless all of them are saved, or
    the output itself is dead at once; they count in ``forward_base``."""
    floor: int
    """No schedule has a lower peak, in bytes: gradients, temporaries and what nodes read."""

    def size(self, j: int) -> int:
        """Return bytes of a D node."""
        return self.graph.d[j].size


def split_stages(graph: CDGraph) -> BlockStages:
    """Return the stages of a graph's backward. Takes linear time, except for the sets of ancestors."""
    made_forward = {j for i in graph.forward for j in graph.c[i].outputs}
    free = frozenset(graph.inputs) | {j for j in made_forward if graph.d[j].size == 0}
    outputs = frozenset(graph.outputs) & made_forward
    before, during, tail, taking = _gradient_bytes(graph)

    needs = {b: tuple(sorted({j for j in graph.c[b].inputs if j in made_forward} - free))
             for b in graph.backward}
    opening = [b for b in graph.backward if needs[b]]

    # From the last stage to the first: what may still be useful from there on.
    useful_nodes: set[int] = set()
    useful_data: set[int] = set()
    stages: list[Stage] = []
    for position in range(len(opening) - 1, -1, -1):
        b = opening[position]
        new = missing_nodes(graph, needs[b], free, useful_nodes)
        useful_nodes |= new
        useful_data.update(needs[b], *(graph.c[i].inputs for i in new))
        useful_data -= free
        start = opening[position - 1] + 1 if position else graph.loss
        idle = max([before[b], *(during[i] for i in range(start, b))])
        stages.append(Stage(b, needs[b], tuple(sorted(useful_nodes)), tuple(sorted(useful_data)),
                            before[b], during[b], _stage_donors(graph, b, needs[b], taking), idle))
    stages.reverse()

    candidates = set(stages[0].carried) if stages else set()
    base, dead, places = _forward_bytes(graph, candidates)
    lean = (n - _largest(graph, p) for n, p in zip(base, places, strict=True))
    floor = max([0, tail, *lean, *(s.idle for s in stages),
                 *(s.during + graph.bytes(s.need)
                   - _largest(graph, s.donors) for s in stages)])
    return BlockStages(graph, tuple(stages), free, outputs, base, dead, places, floor)


def _largest(graph: CDGraph, ds: Iterable[int]) -> int:
    return max((graph.d[j].size for j in ds), default=0)


def _stage_donors(graph: CDGraph, b: int, need: tuple[int, ...],
                taking: set[int]) -> tuple[int, ...]:
    return () if b in taking else tuple(j for j in graph.c[b].donors if j in need)


def _gradient_bytes(graph: CDGraph) -> tuple[dict[int, int], dict[int, int], int, set[int]]:
    """Return, for each backward node, the bytes of the backward's own values right before it and while it
    runs; the greatest value over the nodes (and over the state after the last node); and the nodes whose
    output overwrites a gradient that dies there, or that take no memory."""
    memory = gradient_memory(graph)
    during: dict[int, int] = {}
    taking: set[int] = set()
    for b, alive, dying in zip(graph.backward, memory.during, memory.dying, strict=True):
        node = graph.c[b]
        useless = any(j in dying and j not in graph.releases for j in node.outputs)
        # Of several places, the smallest: which one is taken may depend on what is carried.
        places = [] if useless else [graph.d[j].size for j in node.donors if j in dying]
        if places or useless:
            taking.add(b)
        during[b] = alive + node.overhead - min(places, default=0)
    before = dict(zip(graph.backward, memory.before, strict=True))
    return before, during, max([memory.at_loss, *during.values()]), taking


def _forward_bytes(graph: CDGraph, candidates: set[int]) -> tuple[
        tuple[int, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return, for each forward node: its bytes if nothing is saved, the candidates that come on top if they
    are saved, and the candidates one of which it overwrites if that one is not saved."""
    outputs = set(graph.outputs)
    last: dict[int, int] = {}
    for i in graph.forward:
        for j in (*graph.c[i].outputs, *graph.c[i].inputs):
            last[j] = i
    fixed = set(graph.inputs)
    alive: set[int] = set()
    live = 0
    dead: list[int] = []
    base: list[int] = []
    extra: list[tuple[int, ...]] = []
    several: list[tuple[int, ...]] = []
    for i in graph.forward:
        node = graph.c[i]
        for j in node.outputs:
            alive.add(j)
            live += graph.d[j].size
        gone = [j for j in dict.fromkeys((*node.donors, *node.inputs, *node.outputs))
                if j in alive and last[j] == i and j not in outputs and j not in fixed]
        places = [j for j in node.donors if j in gone]
        certain = [j for j in places if j not in candidates]
        taken = certain[:1] or (places if len(places) == 1 else [])
        if places and node.outputs[0] in gone:
            # Only an output that stays takes a place: this one stays if it is saved.
            taken = []
            places = places if node.outputs[0] in candidates else []
        base.append(live + node.overhead - graph.bytes(taken))
        extra.append((*dead, *(j for j in taken if j in candidates)))
        several.append(() if taken else tuple(places))
        for j in gone:
            if j in alive:
                alive.discard(j)
                live -= graph.d[j].size
                if j in candidates:
                    dead.append(j)
    return tuple(base), tuple(extra), tuple(several)
