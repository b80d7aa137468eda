"""Which operations make a group.

An operation joins the group of what it reads where both go over equally many numbers, so that one loop can
do both. A group stands at one place: in some order of the graph, all who read its values come after its last
operation. Groups of the forward end at what the backward reads of them, so that each such value can be kept,
or computed again, by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from torch import fx

from rkmate.graph.passes.clusters.fusable import extent
from rkmate.graph.passes.clusters.reads import Reads
from rkmate.graph.passes.joint import Joint, is_backward, owner_of

MOST = 48
"""Operations of a group: a kernel of more takes long to compile, and gains nothing."""
SMALL = 8
"""What goes over so many times fewer numbers (a row's mean) joins the groups of what it reads, and of what
reads it."""


def groups(work: Joint, fused: Collection[fx.Node], again: Collection[fx.Node],
           reads: Reads) -> list[list[fx.Node]]:
    """Groups of operations, each in order; those of one operation alone are left out, but where it reads what
    is computed `again`."""
    return _Grower(work, fused, again, reads).found()


def outside_readers(node: fx.Node, members: Collection[fx.Node], again: Collection[fx.Node],
                    fused: Collection[fx.Node], reads: Reads) -> list[fx.Node]:
    """Who reads a member's value, and is neither in its group nor computes it again."""
    return [r for r in reads.readers(node) if r not in members
            and not (node in again and is_backward(r) and r in fused)]


class _Grower:
    def __init__(self, work: Joint, fused: Collection[fx.Node], again: Collection[fx.Node],
                 reads: Reads) -> None:
        self.fused, self.again, self.reads = fused, again, reads
        self.place = {n: k for k, n in enumerate(_order(work.graph, fused))}
        self.leaving = {owner_of(n) for n in work.results()}
        self.group: dict[fx.Node, list[fx.Node]] = {n: [n] for n in self.place if n in fused}
        self.extent: dict[fx.Node, int] = {n: extent(n) for n in self.group}

    def found(self) -> list[list[fx.Node]]:
        for node in list(self.group):
            for operand in dict.fromkeys(map(owner_of, node.all_input_nodes)):
                if operand in self.group and self._may_join(operand, node):
                    self._join(operand, node)
        whole = {id(g): g for g in self.group.values()}
        return [g for g in whole.values() if len(g) > 1 or any(
            owner_of(n) in self.again and is_backward(g[0]) for n in g[0].all_input_nodes)]

    def _may_join(self, operand: fx.Node, node: fx.Node) -> bool:
        a, b = self.group[operand], self.group[node]
        if a is b or is_backward(operand) != is_backward(node) or len(a) + len(b) > MOST:
            return False
        many, few = max(self._extent(a), self._extent(b)), min(self._extent(a), self._extent(b))
        alone = operand not in self.leaving and not self._readers(operand, {*a, *b})
        if many != few and many < SMALL * few and not alone:
            return False
        if not is_backward(node) and self._is_kept(operand) and SMALL * extent(operand) > many:
            return False
        members = {*a, *b}
        last = max(self.place[n] for n in members)
        return all(self.place[r] > last for n in members for r in self._readers(n, members))

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether a value of the forward stays for the backward, or leaves."""
        return node in self.leaving or any(map(is_backward, self._readers(node, ())))

    def _readers(self, node: fx.Node, members: Collection[fx.Node]) -> list[fx.Node]:
        return outside_readers(node, members, self.again, self.fused, self.reads)

    def _extent(self, group: list[fx.Node]) -> int:
        return max(self.extent[n] for n in group)

    def _join(self, operand: fx.Node, node: fx.Node) -> None:
        both = sorted([*self.group[operand], *self.group[node]], key=self.place.__getitem__)
        for n in both:
            self.group[n] = both


def _order(graph: fx.Graph, fused: Collection[fx.Node]) -> list[fx.Node]:
    """The operations in an order in which what may be fused comes as soon as it can."""
    nodes = list(graph.nodes)
    number = {n: k for k, n in enumerate(nodes)}
    missing = {n: len(n.all_input_nodes) for n in nodes}
    ready = [(n.op == "call_function", is_backward(n), n not in fused, number[n])
             for n in nodes if not missing[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)[-1]]
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (True, is_backward(user), user not in fused, number[user]))
    return order
