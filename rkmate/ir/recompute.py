"""Find the computations that run again for nothing, and those that regions under checkpointing run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.schedule import Schedule, from_order


class LeanOrder(NamedTuple):
    """An order without useless repetitions."""

    order: list[int]
    """C nodes."""
    loss_at: int
    """Number of computations before the loss."""
    carried: set[int]
    """D nodes that are read after the loss before they are made there."""


def without_waste(graph: CDGraph, order: Sequence[int], loss_at: int) -> LeanOrder:
    """Return an order without repeated computations none of whose outputs is read before it is made anew.

    First runs stay, whatever reads them. What the user holds is never made anew: it is there.
    """
    there = frozenset(graph.held)
    first: dict[int, int] = {}
    for k, i in enumerate(order):
        first.setdefault(i, k)
    wanted = set(graph.input_grads)
    carried: set[int] = set()
    kept: list[int] = []
    before = 0
    for k in range(len(order) - 1, -2, -1):
        if k + 1 == loss_at:
            carried = set(wanted)
            wanted.update(graph.outputs)
            wanted -= there
            before = len(kept)
        if k < 0:
            break
        node = graph.c[order[k]]
        if first[order[k]] < k and wanted.isdisjoint(node.outputs):
            continue
        wanted.difference_update(node.outputs)
        wanted.update(j for j in node.inputs if j not in there)
        kept.append(order[k])
    return LeanOrder(kept[::-1], len(kept) - before, carried)


def checkpointed(graph: CDGraph, region: Sequence[int | None]) -> Schedule:
    """Return the schedule of a graph as ``torch.utils.checkpoint`` runs it: each region keeps its inputs, and
    runs again as a whole in the backward (Chen et al. 2016, arXiv:1604.06174, with regions that the program
    names).

    `region`: per C node, the region that it belongs to; None for those outside, and for the backward. A
    region runs again before the first backward node that reads what was made inside of it, as far as the
    backward reads it. What is made once (by collectives, by choices) stays.
    """
    inside = _inside(graph, region)
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
    return from_order(graph, order, graph.loss)


def _inside(graph: CDGraph, region: Sequence[int | None]) -> dict[int, int]:
    """Return the D nodes that the forward makes in a region and reads nowhere else, with that region."""
    readers: dict[int, set[int | None]] = {}
    for i, node in enumerate(graph.c[:graph.loss]):
        for j in node.inputs:
            readers.setdefault(j, set()).add(region[i])
    left = {*graph.held, *graph.outputs, *graph.inputs}
    inside: dict[int, int] = {}
    for i, node in enumerate(graph.c[:graph.loss]):
        r = region[i]
        if r is not None and i not in graph.once and not node.decides:
            inside.update((j, r) for j in node.outputs if j not in left and readers.get(j, {r}) == {r})
    return inside
