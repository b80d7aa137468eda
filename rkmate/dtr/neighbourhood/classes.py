"""Evicted components in a union-find: the approximate neighbourhood of h_DTR-eq."""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns, Pool


class EvictedClass:
    """A set of evicted storages that are connected, or were once."""

    __slots__ = ("up", "cost", "border")

    def __init__(self, cost: int) -> None:
        self.up: EvictedClass | None = None
        self.cost = cost
        """Sum of its members' costs; read it at the root only."""
        self.border: set[int] = set()
        """Rows of the resident storages next to a member (some may have left since)."""


class EvictedClasses:
    """The relaxed neighbourhood of the paper's section 4.1 and appendix C.2.

    Edge directions are forgotten. An evicted storage joins its evicted neighbours' classes; a
    rematerialized one takes its cost out of its class and leaves. Classes never split.

    A neighbourhood's cost changes only for storages on the border of a class that changed: these
    are marked, and recomputed when a choice next needs them.
    """

    def __init__(self, columns: Columns) -> None:
        self.accesses = 0
        self._columns = columns
        self._stale: set[int] = set()

    def find(self, member: EvictedClass) -> EvictedClass:
        """The root of a class, halving paths on the way."""
        self.accesses += 1
        while member.up is not None:
            self.accesses += 1
            if member.up.up is not None:
                member.up = member.up.up
            member = member.up
        return member

    def appear(self, node: Node) -> None:
        # A storage that was never computed is a member of a class of its own that costs nothing:
        # it can join others while its operation waits for evicted arguments.
        node.evicted_class = EvictedClass(0)
        self._border(node, node.evicted_class)

    def link(self, node: Node) -> None:
        if node.evicted_class is not None:
            self._border(node, self.find(node.evicted_class))
        else:
            self._stale.add(node.index)
        for parent in node.parents:
            if parent.evicted_class is not None:
                self._border(parent, self.find(parent.evicted_class))

    def evict(self, node: Node) -> None:
        node.evicted_class = root = EvictedClass(node.cost)
        for neighbour in node.evicted_neighbours():
            self.accesses += 1
            assert neighbour.evicted_class is not None
            root = self._merge(self.find(neighbour.evicted_class), root)
        self._border(node, root)
        self._stale |= root.border

    def materialize(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            assert node.evicted_class is not None
            root = self.find(node.evicted_class)
            root.cost -= node.cost
            node.evicted_class = None
            self._stale |= root.border
        for node in nodes:
            self._stale.add(node.index)
            for neighbour in node.evicted_neighbours():
                self.accesses += 1
                assert neighbour.evicted_class is not None
                self.find(neighbour.evicted_class).border.add(node.index)

    def forget(self, node: Node) -> None:
        self._stale.discard(node.index)
        if node.evicted_class is not None:
            root = self.find(node.evicted_class)
            root.cost -= node.cost
            node.evicted_class = None
            self._stale |= root.border

    def refresh(self, pool: Pool) -> None:
        nodes, around = self._columns.nodes, self._columns.around
        waiting: set[int] = set()
        for row in self._stale:
            node = nodes[row]
            if node is None or not node.resident:
                continue
            if node not in pool:
                if not node.pinned:
                    waiting.add(row)
                continue
            around[row] = self._cost_around(node)
        self._stale = waiting

    def _cost_around(self, node: Node) -> int:
        roots = {}
        for neighbour in node.evicted_neighbours():
            self.accesses += 1
            assert neighbour.evicted_class is not None
            root = self.find(neighbour.evicted_class)
            roots[id(root)] = root.cost
        return sum(roots.values())

    def _border(self, node: Node, root: EvictedClass) -> None:
        border = root.border
        for near in (node.parents, node.children):
            for neighbour in near:
                if neighbour.resident and not neighbour.pinned:
                    self.accesses += 1
                    border.add(neighbour.index)
                    self._stale.add(neighbour.index)

    def _merge(self, left: EvictedClass, right: EvictedClass) -> EvictedClass:
        if left is right:
            return left
        if len(left.border) > len(right.border):
            left, right = right, left
        left.up = right
        right.cost += left.cost
        right.border |= left.border
        left.border = set()
        return right
