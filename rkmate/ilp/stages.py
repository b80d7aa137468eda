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

from rkmate.graph.cd import CDGraph


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
    """Bytes of gradients and temporaries while ``node`` runs, its outputs included."""
    idle: int
    """The same for the hungriest backward node between the previous stage and this one; at least
    ``before``."""


@dataclass(frozen=True)
class Stages:
    """All that the integer program needs to know of a graph."""

    graph: CDGraph
    stages: tuple[Stage, ...]
    free: frozenset[int]
    """Forward D nodes that cost nothing: held outside, or of size 0. Always kept."""
    outputs: frozenset[int]
    """Forward D nodes that are there at the loss whatever is saved."""
    forward_base: tuple[int, ...]
    """Per forward C node: bytes while it runs in the forward when nothing is saved."""
    forward_dead: tuple[tuple[int, ...], ...]
    """Per forward C node: D nodes of stage 0 that count on top of that if they are saved."""
    floor: int
    """No schedule has a lower peak, in bytes: gradients, temporaries and what nodes read."""

    def size(self, j: int) -> int:
        """Bytes of a D node."""
        return self.graph.d[j].size


def split_stages(graph: CDGraph) -> Stages:
    """The stages of a graph's backward. Linear in the graph but for the sets of ancestors."""
    producer = graph.producer
    made_forward = {j for i in graph.forward for j in graph.c[i].outputs}
    free = frozenset(graph.inputs) | {j for j in made_forward if graph.d[j].size == 0}
    outputs = frozenset(graph.outputs) & made_forward
    before, during, tail = _gradient_bytes(graph, made_forward)

    needs = {b: tuple(sorted({j for j in graph.c[b].inputs if j in made_forward} - free))
             for b in graph.backward}
    opening = [b for b in graph.backward if needs[b]]

    # From the last stage to the first: what may still be useful from there on.
    useful_nodes: set[int] = set()
    useful_data: set[int] = set()
    stages: list[Stage] = []
    for position in range(len(opening) - 1, -1, -1):
        b = opening[position]
        _close(graph, producer, needs[b], free, useful_nodes, useful_data)
        start = opening[position - 1] + 1 if position else graph.loss
        idle = max([before[b], *(during[i] for i in range(start, b))])
        stages.append(Stage(b, needs[b], tuple(sorted(useful_nodes)), tuple(sorted(useful_data)),
                            before[b], during[b], idle))
    stages.reverse()

    candidates = set(stages[0].carried) if stages else set()
    base, dead = _forward_bytes(graph, candidates)
    floor = max([0, tail, *base, *(s.idle for s in stages),
                 *(s.during + graph.bytes(s.need) for s in stages)])
    return Stages(graph, tuple(stages), free, outputs, base, dead, floor)


def _close(graph: CDGraph, producer: tuple[int | None, ...], need: Iterable[int],
           free: frozenset[int], nodes: set[int], data: set[int]) -> None:
    """Add to `nodes` and `data` what may help to bring `need` into memory."""
    stack = list(need)
    while stack:
        j = stack.pop()
        if j in data or j in free:
            continue
        data.add(j)
        i = producer[j]
        assert i is not None, "forward data that is not free has a producer"
        if i not in nodes:
            nodes.add(i)
            stack.extend(graph.c[i].inputs)


def _gradient_bytes(graph: CDGraph, made_forward: set[int]) -> tuple[dict[int, int],
                                                                     dict[int, int], int]:
    """Per backward node the bytes of the backward's own data right before it and while it runs,
    and the greatest value over the nodes (and over the state after the last one)."""
    last: dict[int, int] = {}
    for b in graph.backward:
        for j in graph.c[b].inputs:
            last[j] = b
    for j, i in graph.exits.items():
        last[j] = max(last.get(j, -1), i)
    stay = set(graph.input_grads)
    skip = made_forward | set(graph.inputs)
    alive = {j for j in graph.output_grads if j not in skip and (j in last or j in stay)}
    live = graph.bytes(alive)
    before: dict[int, int] = {}
    during: dict[int, int] = {}
    dies: dict[int, list[int]] = {}
    for j, b in last.items():
        if j not in skip and j not in stay:
            dies.setdefault(b, []).append(j)
    top = live
    for b in graph.backward:
        before[b] = live
        created = [j for j in graph.c[b].outputs if j not in skip]
        live += graph.bytes(created)
        during[b] = live + graph.c[b].overhead
        top = max(top, during[b])
        gone = dies.get(b, []) + [j for j in created if j not in last and j not in stay]
        live -= graph.bytes(gone)
    return before, during, top


def _forward_bytes(graph: CDGraph, candidates: set[int]) -> tuple[tuple[int, ...],
                                                                  tuple[tuple[int, ...], ...]]:
    """Per forward node: bytes when nothing is saved, and the candidates that come on top of them
    when they are."""
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
    for i in graph.forward:
        node = graph.c[i]
        for j in node.outputs:
            alive.add(j)
            live += graph.d[j].size
        base.append(live + node.overhead)
        extra.append(tuple(dead))
        for j in {*node.inputs, *node.outputs}:
            if j in alive and last[j] == i and j not in outputs and j not in fixed:
                alive.discard(j)
                live -= graph.d[j].size
                if j in candidates:
                    dead.append(j)
    return tuple(base), tuple(extra)
