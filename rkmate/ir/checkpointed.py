"""A step as ``torch.utils.checkpoint`` runs it: each region keeps its inputs, and runs again as a whole in
the backward (Chen et al. 2016, arXiv:1604.06174, with regions that the program names)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rkmate.ir.cd import CDGraph
from rkmate.ir.recompute import missing_nodes
from rkmate.ir.schedule import Schedule, from_order


def checkpointed(graph: CDGraph, region: Sequence[int | None], pinned: Iterable[int] = ()) -> Schedule:
    """The schedule of a graph under checkpointing.

    `region`: per C node, the region that it belongs to; None for those outside, and for the backward. A
    region runs again before the first backward node that reads what was made inside of it, as far as the
    backward reads it. `pinned`: D nodes that the user holds.
    """
    pinned = frozenset(pinned)
    inside = _inside(graph, region, pinned)
    wanted: dict[int | None, set[int]] = {}
    for node in graph.c[graph.loss:]:
        for j in node.inputs:
            if j in inside:
                wanted.setdefault(inside[j], set()).add(j)
    order = list(range(graph.loss))
    there = {j for j in range(len(graph.d)) if j not in inside}
    for i in range(graph.loss, len(graph.c)):
        for r in sorted({inside[j] for j in graph.c[i].inputs if j not in there}):
            again = sorted(missing_nodes(graph, wanted[r], there))
            order += again
            there.update(j for k in again for j in graph.c[k].outputs)
        order.append(i)
    return from_order(graph, order, graph.loss, pinned)


def _inside(graph: CDGraph, region: Sequence[int | None], pinned: frozenset[int]) -> dict[int, int]:
    """D nodes that the forward makes in a region and reads nowhere else, with that region."""
    readers: dict[int, set[int | None]] = {}
    for i, node in enumerate(graph.c[:graph.loss]):
        for j in node.inputs:
            readers.setdefault(j, set()).add(region[i])
    left = pinned.union(graph.outputs, graph.inputs)
    inside: dict[int, int] = {}
    for i, node in enumerate(graph.c[:graph.loss]):
        r = region[i]
        if r is not None:
            inside.update((j, r) for j in node.outputs if j not in left and readers.get(j, {r}) == {r})
    return inside
