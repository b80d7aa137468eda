"""Partial saves: what a block's first forward may leave in memory to make its later runs cheaper.

For each class of equal blocks, a few sets of forward D nodes are found, from small to large: starting
with nothing, the set grows by what saves most seconds per byte, of what one node makes, of what is
alive between two nodes, and of what an option saves (`_growing_sets`). Sets off the convex hull of
(bytes, seconds) are left out. A price, in seconds per byte, then picks one set in every class at once:
the one that pays at this price. So each price gives one partial save of every block, and those of one
price share an index (`rkmate.rotor.partial_saves`). Seconds and bytes are the simulator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rkmate.ir.cd import CDGraph, CNode
from rkmate.ir.chain import Option, PartialSave
from rkmate.ir.recompute import missing_nodes, without_waste
from rkmate.ir.schedule import Compute, Loss, from_order
from rkmate.ir.simulate import simulate

_Set = frozenset[int]


def partial_saves(graphs: Sequence[CDGraph], options: Sequence[Sequence[Option]],
           count: int) -> list[tuple[PartialSave, ...]]:
    """Return the partial saves of each class of blocks: the same number for all classes, at most `count`.

    `graphs`, `options`: of each class. Saves of one index are those that pay at one price of memory.
    """
    sets = [_growing_sets(g, o) for g, o in zip(graphs, options, strict=True)]
    prices = sorted({(a[1] - b[1]) / (b[0] - a[0]) for found in sets
                     for a, b in zip(found, found[1:], strict=False)})
    if not prices:
        return [() for _ in graphs]
    chosen: list[list[_Set]] = []
    for price in np.quantile(prices, np.linspace(0.1, 0.8, count)):
        paying = [min(found, key=lambda x: x[1] + x[0] * price * (1 - 1e-3))[2] for found in sets]
        if paying not in chosen and any(paying):
            chosen.append(paying)
    made: dict[tuple[int, _Set], PartialSave] = {}
    for paying in chosen:
        for k, kept in enumerate(paying):
            if (k, kept) not in made:
                made[k, kept] = partial_save(graphs[k], options[k], kept)
    return [tuple(made[k, paying[k]] for paying in chosen) for k in range(len(graphs))]


def partial_save(graph: CDGraph, options: Sequence[Option], kept: _Set) -> PartialSave:
    """Return the partial save of some forward D nodes: what it costs to make, and the block from then on."""
    first = _simulated(graph, graph.forward, frozenset(), (*graph.outputs, *kept))[1]
    later = _forward(graph, kept, graph.outputs)
    seconds, peak = _simulated(graph, later, kept, graph.outputs)
    found: list[Option] = []
    orders = {_order(graph, o, kept) for o in options}
    for option in sorted((_option(graph, *order, kept) for order in orders),
                         key=lambda o: (*_figures(o), o.forward, o.backward)):
        mine = _figures(option)
        if all(any(a > b for a, b in zip(_figures(o), mine, strict=True)) for o in found):
            found.append(option)
    return PartialSave(graph.bytes(kept), tuple(later), seconds, peak, first, tuple(found))


def _figures(o: Option) -> tuple[float, ...]:
    return (o.forward_seconds + o.backward_seconds, o.saved_bytes, o.forward_peak_bytes,
            o.backward_peak_bytes)


def _growing_sets(graph: CDGraph, options: Sequence[Option]) -> list[tuple[int, float, _Set]]:
    """Return the sets to choose from, from none to large: (bytes, seconds, D nodes), on a convex hull.

    The seconds are those of a plain forward, and of forward and backward with the option that saves
    least, where the set is in memory.
    """
    frugal = min(options, key=lambda o: (o.saved_bytes, o.backward_seconds))
    inner = [j for i in graph.forward for j in graph.c[i].outputs if j not in graph.outputs]
    moves: set[_Set] = {frozenset([j]) for j in inner}
    for cut in range(1, graph.loss):
        moves.add(frozenset(j for j in inner if (graph.producer[j] or 0) < cut
                            and any(cut <= r < graph.loss for r in graph.readers[j])))
    for o in options:
        moves.add(frozenset(_backward(graph, o.backward, frozenset())[1]) & frozenset(inner))
    moves.discard(frozenset())

    def seconds(kept: _Set) -> float:
        back, wanted = _backward(graph, frugal.backward, kept)
        return sum(graph.c[i].time for i in (*_forward(graph, kept, graph.outputs), *back,
                                             *_forward(graph, kept, {*graph.outputs, *wanted})))

    here: _Set = frozenset()
    least = seconds(here)
    hull = [(0, least, here)]
    seen: dict[_Set, float] = {}
    while True:
        steps = []
        for there in {here | m for m in moves} - {here}:
            if there not in seen:
                seen[there] = seconds(there)
            gain = least - seen[there]
            if gain > 1e-9 * least:
                steps.append((-gain / (graph.bytes(there - here) + 1), sorted(there)))
        if not steps:
            return hull
        here = frozenset(min(steps)[1])
        least = seen[here]
        size = graph.bytes(here)
        while hull and (hull[-1][0] >= size or (len(hull) > 1 and (hull[-1][1] - least) * (
                hull[-1][0] - hull[-2][0]) >= (hull[-2][1] - hull[-1][1]) * (size - hull[-1][0]))):
            if len(hull) == 1:
                break
            hull.pop()
        if size > hull[-1][0]:
            hull.append((size, least, here))


def _forward(graph: CDGraph, kept: _Set, wanted: Iterable[int]) -> list[int]:
    """Return the forward nodes that it takes to have some D nodes, where others are there."""
    return sorted(missing_nodes(graph, wanted, kept))


def _backward(graph: CDGraph, backward: Sequence[int], kept: _Set) -> tuple[list[int], set[int]]:
    """Return a backward's nodes without the recomputations that nothing reads if `kept` is in memory, and the
    other D nodes that the backward finds saved."""
    lean = without_waste(graph, (*graph.forward, *backward), graph.loss, kept)
    return lean.order[lean.loss_at:], lean.carried


def _without(graph: CDGraph, node: CNode, kept: _Set) -> CNode:
    """Return the node, where it makes again what is kept: a temporary."""
    remade = kept.intersection(node.outputs)
    if not remade:
        return node
    return replace(node, outputs=tuple(j for j in node.outputs if j not in remade), donors=(),
                   overhead=node.overhead + graph.bytes(remade))


def _part(graph: CDGraph, nodes: Sequence[int], kept: _Set, outputs: Iterable[int]) -> CDGraph:
    """Return the graph of some of its nodes, where what is kept is external."""
    new = {i: k for k, i in enumerate(nodes)}
    return CDGraph(graph.d, tuple(_without(graph, graph.c[i], kept) for i in nodes),
                   sum(i < graph.loss for i in nodes), (*graph.inputs, *kept), tuple(outputs),
                   graph.output_grads, graph.input_grads,
                   {j: new[i] for j, i in graph.releases.items() if i in new})


def _simulated(graph: CDGraph, nodes: Sequence[int], kept: _Set,
               outputs: Iterable[int]) -> tuple[float, int]:
    """Return seconds and peak of forward nodes alone."""
    part = _part(graph, nodes, kept, outputs)
    part = replace(part, inputs=(*part.inputs, *part.output_grads), output_grads=(), input_grads=(),
                   releases={})
    result = simulate(part, from_order(part, range(len(nodes)), len(nodes)))
    return result.seconds, result.peak


def _order(graph: CDGraph, option: Option, kept: _Set) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return an option's forward and backward less the nodes that nothing reads where some D nodes are
    there."""
    back, wanted = _backward(graph, option.backward, kept)
    return tuple(_forward(graph, kept, {*graph.outputs, *wanted})), tuple(back)


def _option(graph: CDGraph, there: tuple[int, ...], back: tuple[int, ...], kept: _Set) -> Option:
    """Return the option that runs these nodes in the forward and in the backward, with its costs."""
    nodes = sorted({*there, *back})
    new = {i: k for k, i in enumerate(nodes)}
    part = _part(graph, nodes, kept, graph.outputs)
    schedule = from_order(part, [new[i] for i in (*there, *back)], len(there))
    result = simulate(part, schedule)
    at = next(k for k, step in enumerate(schedule.steps) if isinstance(step, Loss))
    first = next((k for k in range(at + 1, len(schedule.steps))
                  if isinstance(schedule.steps[k], Compute)), len(schedule.steps))
    external = set(part.inputs) | set(graph.output_grads)
    return Option(there, back, sum(graph.c[i].time for i in there),
                  sum(graph.c[i].time for i in back),
                  result.saved - graph.bytes(set(graph.outputs) - external),
                  max(result.timeline[:at], default=0), max(result.timeline[first:], default=0))
