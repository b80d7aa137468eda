"""Evicted components in a union-find: the approximate neighbourhood of h_DTR-eq."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rkmate.dtr.node import EvictedClass, Node
from rkmate.dtr.pool import Columns, Pool

_WIDTH = 4
_NOTHING = 0


class EvictedClasses:
    """The relaxed neighbourhood of the paper's section 4.1 and appendix C.2.

    Edge directions are forgotten. An evicted storage joins its evicted neighbours' classes; a
    rematerialized one takes its cost out of its class and leaves. Classes never split.

    Each resident storage's row names the few classes next to it, so that a class's cost can change
    without visiting its border: a choice gathers the costs of all candidates in one pass. Rows
    change only where an edge or a merge touched them, and are brought up to date when a choice
    next needs them. Of two classes that merge, the one with the shorter border gives up its name.
    """

    def __init__(self, columns: Columns) -> None:
        self.accesses = 0
        self._columns = columns
        self._stale: set[int] = set()
        self._costs = np.zeros(256)
        self._used = 1
        self._free: list[int] = []
        self._near = np.zeros((len(columns.size), _WIDTH), dtype=np.int64)
        self._many: dict[int, list[int]] = {}

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
        self._room()
        node.evicted_class = self._new(0)
        self._border(node, node.evicted_class)

    def link(self, node: Node) -> None:
        if node.evicted_class is not None:
            self._border(node, self.find(node.evicted_class))
        else:
            self._stale.add(node.index)
        for parent in node.parents:
            if parent.evicted_class is not None:
                self._border(parent, self.find(parent.evicted_class))

    def costlier(self, node: Node) -> None:
        # A class keeps the cost that its member had when it joined.
        return

    def born(self, node: Node) -> None:
        # Resident parents and no children: no class is near, and its row says so already.
        self._room()

    def evict(self, node: Node) -> None:
        node.evicted_class = root = self._new(node.cost)
        for neighbour in node.evicted_neighbours():
            self.accesses += 1
            assert neighbour.evicted_class is not None
            root = self._merge(self.find(neighbour.evicted_class), root)
        self._border(node, root)

    def materialize(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._leave(node)
        for node in nodes:
            self._stale.add(node.index)
            for near in (node.parents, node.children):
                for neighbour in near:
                    self.accesses += 1
                    if neighbour.evicted_class is not None:
                        self.find(neighbour.evicted_class).border.add(node.index)
                    elif not neighbour.pinned:
                        self._stale.add(neighbour.index)

    def pin(self, node: Node) -> None:
        # Its row is not looked at any more.
        return

    def forget(self, node: Node) -> None:
        if node.evicted_class is not None:
            self._leave(node)
            for near in (node.parents, node.children):
                self._stale.update(other.index for other in near if other.resident)
        self._stale.discard(node.index)
        self._many.pop(node.index, None)
        self._near[node.index] = _NOTHING

    def refresh(self, pool: Pool) -> None:
        waiting: set[int] = set()
        nodes = self._columns.nodes
        for row in self._stale:
            node = nodes[row]
            if node is None or not node.resident or node.pinned:
                continue
            if node in pool:
                self._name_classes(node)
            else:
                waiting.add(row)
        self._stale = waiting
        rows = pool.rows()
        self._columns.around[rows] = self._costs[self._near[rows]].sum(axis=1)
        for row, slots in self._many.items():
            self._columns.around[row] = self._costs[slots].sum()

    def _room(self) -> None:
        if len(self._near) < len(self._columns.size):
            grown = np.zeros((len(self._columns.size), _WIDTH), dtype=np.int64)
            grown[: len(self._near)] = self._near
            self._near = grown

    def _name_classes(self, node: Node) -> None:
        slots = set()
        for neighbour in node.evicted_neighbours():
            self.accesses += 1
            assert neighbour.evicted_class is not None
            slots.add(self.find(neighbour.evicted_class).slot)
        row = node.index
        self._many.pop(row, None)
        if len(slots) > _WIDTH:
            self._many[row] = list(slots)
            slots = set()
        self._near[row] = [*slots, *(_NOTHING,) * (_WIDTH - len(slots))]

    def _new(self, cost: int) -> EvictedClass:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._used
            self._used += 1
            if slot == len(self._costs):
                self._costs = np.concatenate([self._costs, np.zeros(slot)])
        self._costs[slot] = cost
        return EvictedClass(slot)

    def _leave(self, node: Node) -> None:
        assert node.evicted_class is not None
        self._costs[self.find(node.evicted_class).slot] -= node.cost
        node.evicted_class = None

    def _border(self, node: Node, root: EvictedClass) -> None:
        for near in (node.parents, node.children):
            for neighbour in near:
                if neighbour.resident and not neighbour.pinned:
                    self.accesses += 1
                    root.border.add(neighbour.index)
                    self._stale.add(neighbour.index)

    def _merge(self, left: EvictedClass, right: EvictedClass) -> EvictedClass:
        if left is right:
            return left
        if len(left.border) > len(right.border):
            left, right = right, left
        left.up = right
        self._costs[right.slot] += self._costs[left.slot]
        self._costs[left.slot] = 0.0
        self._free.append(left.slot)
        self._stale |= left.border
        right.border |= left.border
        left.border = set()
        return right
