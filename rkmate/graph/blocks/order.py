"""The order of a block's computations: another topological order may need less memory.

A trace has the order in which autograd happened to call its formulas: the gradient of an input often
comes before the gradient of the weight, whose own input could have been dropped in between. Several
orders are tried, and the simulator says which one is best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rkmate.graph.blocks.partition import Block, Partition, rearranged
from rkmate.graph.capture.captured import Source
from rkmate.graph.ops.collectives import is_collective
from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.schedule import from_order
from rkmate.ir.simulate import simulate

Rule = Callable[[int, int, int], tuple[int, ...]]
"""(bytes that a node allocates, bytes that stay after it less those that die, its place) -> what to
run first: the least."""
MOST = 20_000
"""Computations of the longest schedule that an order is judged by; longer blocks stay as they are."""
_RULES: tuple[Rule, ...] = (
    lambda allocated, net, place: (net, allocated, place),
    lambda allocated, net, place: (allocated, net, place),
    lambda allocated, net, place: (max(0, net), place),
)


def reordered(parts: Partition, stages: Sequence[Block] = ()) -> Partition:
    """Return the partition with each block in the best order found; as it is where the step gains nothing.

    `stages`: the same C nodes, cut otherwise; what is of one stage stays together.
    """
    chained = [*_shared_gradients(parts), _collectives(parts)]
    stage = {i: s.index for s in stages for i in s.c}
    known: dict[object, list[int]] = {}
    orders = []
    for block in parts.blocks:
        local = {i: k for k, i in enumerate(block.c)}
        inside = (tuple(local[i] for i in chain if i in local) for chain in chained)
        chains = tuple(chain for chain in inside if len(chain) > 1)
        groups = tuple(_runs([stage.get(i) for i in block.c], block.graph) if stages else ())
        key = _shape(block, (chains, groups))
        if key not in known:
            known[key] = better_order(block.graph, chains, groups)
        orders.append(known[key])
    if all(order == sorted(order) for order in orders):
        return parts
    new = rearranged(parts, orders)
    return new if _step_peak(new) <= _step_peak(parts) else parts


def _shared_gradients(parts: Partition) -> list[list[int]]:
    """Return lists of C nodes that make, or add, the gradients of one parameter: they are added up in this
    order."""
    program = parts.program
    made: dict[object, list[int]] = {}
    for source, node in program.param_grads:
        j = program.d_of(node)
        i = None if j is None else program.cd.producer[j]
        if i is not None:
            made.setdefault(source, []).append(i)
    for i, c in enumerate(program.cd.c):
        for node in program.operation[i].all_input_nodes if c.adds else ():
            place = program.storage[node]
            if isinstance(place, Source) and place.kind == "grad":
                made.setdefault(place, []).append(i)
    return [sorted(set(nodes)) for nodes in made.values()]


def _collectives(parts: Partition) -> list[int]:
    """Return the C nodes that communicate, which all ranks run in one order."""
    return [i for i, node in enumerate(parts.program.operation) if is_collective(node.target)]


def _runs(stages: Sequence[int | None], graph: CDGraph) -> list[tuple[int, ...]]:
    """Return runs of consecutive C nodes of one stage."""
    runs: list[list[int]] = []
    for i, stage in enumerate(stages):
        if not runs or i == graph.loss or stage != stages[i - 1]:
            runs.append([])
        runs[-1].append(i)
    return [tuple(run) for run in runs]


def _shape(block: Block, chains: object) -> object:
    """Return everything that a block's order depends on: equal for identical blocks."""
    graph = block.graph
    return (tuple(d.size for d in graph.d),
            tuple((c.inputs, c.outputs, c.donors, c.random) for c in graph.c), graph.loss,
            graph.inputs, graph.outputs, graph.output_grads, graph.input_grads, tuple(graph.releases), chains)


def _step_peak(parts: Partition) -> int:
    return _peak(parts.program.cd, range(len(parts.program.cd.c)))


def better_order(graph: CDGraph, chained: Sequence[Sequence[int]] = (),
                 groups: Sequence[Sequence[int]] = ()) -> list[int]:
    """Return an order of a block's C nodes in which training, and the forward alone, need less memory.

    The graph's own where no other was found to be better. `chained`: C nodes that stay in their order
    among themselves; `groups`: C nodes of which none runs before all of the group before.
    """
    graph = replace(graph, releases={j: _made(graph, j, i) for j, i in graph.releases.items()})
    best = [*graph.forward, *graph.backward]
    peaks = _peaks(graph, best)
    if peaks is None:
        return best
    after = _pairs((*chained, [i for i in range(len(graph.c)) if graph.c[i].random]))
    for before, group in zip(groups, groups[1:], strict=False):
        for i in group:
            after.setdefault(i, set()).update(before)
    for phase in (graph.forward, graph.backward):
        for rule in _RULES:
            order = list(best)
            order[phase.start:phase.stop] = _scheduled(graph, phase, rule, after)
            if order == best:
                continue
            found = _peaks(graph, order, peaks)
            if found is not None and found != peaks:
                best, peaks = order, found
    return best


def _made(graph: CDGraph, j: int, end: int) -> int:
    made = graph.producer[j]
    return end if made is None else made


def _pairs(chains: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Return, for a C node, the nodes that come before it although it reads nothing of theirs."""
    result: dict[int, set[int]] = {}
    for chain in chains:
        for first, then in zip(chain, chain[1:], strict=False):
            result.setdefault(then, set()).add(first)
    return result


def _peak(graph: CDGraph, order: Sequence[int]) -> int:
    return simulate(graph, from_order(graph, order, graph.loss)).peak


def _peaks(graph: CDGraph, order: Sequence[int],
           most: tuple[int, int, int] | None = None) -> tuple[int, int, int] | None:
    """Return the peaks of the forward alone, of training with everything kept, and of training with nothing
    kept.

    Without memory for more, each backward node has what it reads computed again, from the block's input.
    None where that is long to simulate, or where one of them is more than `most`.
    """
    n = graph.loss
    forward = CDGraph(graph.d, graph.c[:n], n, (*graph.inputs, *graph.output_grads), graph.outputs)
    alone = simulate(forward, from_order(forward, order[:n], n)).peak
    whole = _peak(graph, order) if most is None or alone <= most[0] else None
    if whole is None or (most is not None and whole > most[1]):
        return None
    frugal = list(order[:n])
    for i in order[n:]:
        again = missing_nodes(graph, graph.c[i].inputs)
        frugal += [*(k for k in order[:n] if k in again), i]
        if len(frugal) > MOST:
            return None
    least = simulate(graph, from_order(graph, frugal, n)).peak
    return None if most is not None and least > most[2] else (alone, whole, least)


def _scheduled(graph: CDGraph, phase: range, rule: Rule, after: dict[int, set[int]]) -> list[int]:
    """List scheduling of one phase: of the nodes that can run, always the first one by the rule."""
    size = [d.size for d in graph.d]
    readers: dict[int, set[int]] = {}
    for i in phase:
        for j in graph.c[i].inputs:
            readers.setdefault(j, set()).add(i)
    stay = {*graph.outputs, *graph.input_grads, *graph.inputs}
    stay.update(j for c in graph.c[phase.stop:] for j in c.inputs)
    waits: dict[int, set[int]] = {}
    for i in phase:
        before = {*(graph.producer[j] for j in graph.c[i].inputs), *after.get(i, ())}
        waits[i] = {b for b in before if b is not None and b in phase}
    unlocks: dict[int, list[int]] = {}
    for i, needed in waits.items():
        for b in needed:
            unlocks.setdefault(b, []).append(i)

    def key(i: int) -> tuple[int, ...]:
        node = graph.c[i]
        dying = [j for j in node.inputs if readers[j] == {i} and j not in stay]
        place = next((size[j] for j in node.donors if j in dying), 0)
        left = sum(size[j] for j in node.outputs
                   if j in stay or (j in readers and j not in graph.releases))
        return rule(sum(size[j] for j in node.outputs) - place, left - sum(size[j] for j in dying), i)

    ready = {i for i in phase if not waits[i]}
    order: list[int] = []
    while ready:
        best = min(ready, key=key)
        ready.remove(best)
        order.append(best)
        for j in graph.c[best].inputs:
            readers[j].discard(best)
        for i in unlocks.get(best, ()):
            waits[i].discard(best)
            if not waits[i]:
                ready.add(i)
    return order
