"""What the backward's groups compute again of the forward, rather than read: a minimum cut.

An operation on each number by itself costs next to nothing inside of a kernel that reads its operand anyway.
Of all sets of values that the groups of the backward can be computed from, one with the fewest bytes is kept;
what stays for another reason (a product of the backward reads it, the caller holds it) is free.
"""

from __future__ import annotations

from collections.abc import Collection

import networkx as nx
from torch import fx

from rkmate.graph.passes.clusters.fusable import bytes_of, is_pointwise
from rkmate.graph.passes.clusters.reads import Reads
from rkmate.graph.passes.joint import Joint, is_backward, owner_of

_MADE_ANYWAY = 0.95
"""What a byte counts of a value that could be computed again: on a tie it is kept, and what it is made of is
not."""
MOST_AGAIN = 24
"""Operations that one value may take to be computed again: more make groups that
take long to compile, and a long chain would be computed once for each of the groups that read of it."""


def computed_again(work: Joint, fused: Collection[fx.Node], reads: Reads) -> set[fx.Node]:
    """Operations of the forward whose values groups of the backward compute for themselves."""
    wanted = {o for n in fused if is_backward(n) for o in map(owner_of, n.all_input_nodes)
              if not is_backward(o)}
    cheap = {n for n in fused if not is_backward(n) and is_pointwise(n)}
    if wanted.isdisjoint(cheap):
        return set()
    free = {owner_of(n) for n in work.results()}

    def is_held(value: fx.Node) -> bool:
        return value.op != "call_function" or value in work.constant or value in free \
            or any(is_backward(r) and r not in fused for r in reads.readers(value))

    below: dict[fx.Node, set[fx.Node]] = {}
    """What is computed again for a value."""
    for node in (n for n in work.graph.nodes if n in cheap):
        operands = [o for o in map(owner_of, node.all_input_nodes) if o in below and not is_held(o)]
        below[node] = {node}.union(*(below[o] for o in operands))
        if len(below[node]) > MOST_AGAIN:
            del below[node]
    cheap.intersection_update(below)
    graph = nx.DiGraph()
    todo, seen = list(wanted), set(wanted)
    while todo:
        value = todo.pop()
        size = 0.0 if is_held(value) else bytes_of(value) * (_MADE_ANYWAY if value in cheap else 1.0) + 1
        graph.add_edge((value, "made"), (value, "read"), capacity=size)
        if value in wanted:
            graph.add_edge((value, "read"), "backward")
        if value not in cheap:
            graph.add_edge("forward", (value, "made"))
            continue
        for operand in map(owner_of, value.all_input_nodes):
            graph.add_edge((operand, "read"), (value, "made"))
            if operand not in seen:
                seen.add(operand)
                todo.append(operand)
    if "forward" not in graph:
        return set()
    _, (_, late) = nx.minimum_cut(graph, "forward", "backward")
    return {v for v in cheap & seen if (v, "made") in late}
