"""What must run again to have something, and what runs again for nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rkmate.ir.cd import CDGraph


def missing_nodes(graph: CDGraph, wanted: Iterable[int], available: Iterable[int] = (),
                  known: Collection[int] = ()) -> set[int]:
    """The forward nodes that must run to bring the D nodes `wanted` into memory.

    `available`: D nodes that are in memory. `known`: C nodes that run anyway, and whatever they need;
    they are left out. What comes from outside, and gradients, are taken to be there.
    """
    there = available if isinstance(available, set | frozenset) else frozenset(available)
    found: set[int] = set()
    todo = [j for j in wanted if j not in there]
    while todo:
        i = graph.producer[todo.pop()]
        if i is not None and i < graph.loss and i not in found and i not in known:
            found.add(i)
            todo += [j for j in graph.c[i].inputs if j not in there]
    return found


class LeanOrder(NamedTuple):
    """An order in which nothing runs again for nothing."""

    order: list[int]
    """C nodes."""
    loss_at: int
    """How many of them run before the loss."""
    carried: set[int]
    """D nodes that are read after the loss before they are made there."""


def without_waste(graph: CDGraph, order: Sequence[int], loss_at: int,
                  available: Iterable[int] = ()) -> LeanOrder:
    """An order less the repeated computations none of whose outputs is read before it is made anew.

    First runs stay, whatever reads them. `available`: D nodes that are in memory all the time.
    """
    there = frozenset(available)
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
