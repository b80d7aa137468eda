"""Evicted neighbourhoods: what an eviction would add to later rematerializations.

A `Tracker` keeps the cost of each storage's evicted neighbourhood. `EvictedRegions` keeps the exact
neighbourhood e*, evicted ancestors and evicted descendants; `EvictedClasses` approximates it for h_DTR-eq,
with evicted components in a union-find.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rkmate.dtr.pool import Columns, EvictedClass, Node, Pool


class Tracker:
    """Keeps ``Columns.around``: the cost of each evictable storage's evicted neighbourhood. This class leaves
    each cost at 0, for heuristics that look at a storage alone."""

    def __init__(self, columns: Columns) -> None:
        self.accesses = 0
        """Storages visited so far to keep the metadata (paper, appendix D.3)."""
        self._columns = columns

    def appear(self, node: Node) -> None:
        """Note that an operation is pending that will compute ``node`` for the first time."""

    def link(self, node: Node) -> None:
        """Note that a pending view of ``node`` gave it more parents."""

    def costlier(self, node: Node) -> None:
        """Note that a pending view of ``node`` raised its cost."""

    def born(self, node: Node) -> None:
        """Note that ``node`` was computed for the first time, while all its parents were in memory."""

    def evict(self, node: Node) -> None:
        """Note that ``node`` has just left memory."""

    def materialize(self, nodes: Sequence[Node]) -> None:
        """Note that an operation has just brought ``nodes`` into memory."""

    def pin(self, node: Node) -> None:
        """Note that ``node``, in memory, will not be chosen any more; its edges still exist."""

    def forget(self, node: Node) -> None:
        """Note that ``node`` leaves the graph for ever; its edges still exist."""

    def refresh(self, pool: Pool) -> None:
        """Bring the column up to date for the members of ``pool``."""


class _Region:
    """The evicted storages that one resident storage reaches through evicted ones, one way."""

    __slots__ = ("inside", "edge", "cost")

    def __init__(self) -> None:
        self.inside: set[int] = set()
        """Rows of the evicted storages."""
        self.edge: set[int] = set()
        """Rows of the resident storages at which the walk stopped."""
        self.cost = 0
        """Sum of the costs inside."""


class EvictedRegions(Tracker):
    """The evicted neighbourhood of the paper's appendix C.2, cached as in appendix C.5.

    Ancestors and descendants are kept apart. An eviction merges the evicted storage's own region
    into those of the storages at its edge; a rematerialization walks the graph anew for the
    storages at the edge of what came back. With ``ancestors_only`` the column holds the cost of
    the evicted ancestors, which is what MSPS needs.
    """

    def __init__(self, columns: Columns, *, ancestors_only: bool = False) -> None:
        super().__init__(columns)
        self._ancestors_only = ancestors_only
        self._down: dict[int, _Region] = {}
        self._up: dict[int, _Region] = {}
        self._linked: set[int] = set()
        """Rows of the storages whose later parents some caches do not know."""
        self._costlier: set[int] = set()
        """Rows of the evicted storages whose later cost some caches do not know."""

    def appear(self, node: Node) -> None:
        self._down[node.index] = _Region()
        self._up[node.index] = _Region()

    def link(self, node: Node) -> None:
        # The caches follow when a rematerialization next walks this part of the graph.
        self._linked.add(node.index)

    def costlier(self, node: Node) -> None:
        if not node.resident:
            self._costlier.add(node.index)

    def born(self, node: Node) -> None:
        # Its parents are the edge of an empty region, and it joins the edge of theirs.
        up = _Region()
        for parent in node.parents:
            if parent.pinned:
                continue
            up.edge.add(parent.index)
            self._down[parent.index].edge.add(node.index)
        self._up[node.index] = up
        self._down[node.index] = _Region()

    def evict(self, node: Node) -> None:
        row = node.index
        down, up = self._down[row], self._up[row]
        if node.pinned:
            # The program dropped it: it has no regions of its own.
            down, up = self._walk(node, down=True), self._walk(node, down=False)
        for edge in up.edge:
            self._absorb(self._down[edge], node, down)
            self._note(edge)
        for edge in down.edge:
            self._absorb(self._up[edge], node, up)
            self._note(edge)
        self._down[row] = _Region()
        self._up[row] = _Region()

    def materialize(self, nodes: Sequence[Node]) -> None:
        below: set[int] = set()
        above: set[int] = set()
        for node in nodes:
            self._down[node.index] = self._walk(node, down=True)
            self._up[node.index] = self._walk(node, down=False)
            above |= self._up[node.index].edge
            below |= self._down[node.index].edge
            self._note(node.index)
        # A storage that another operation will evict or compute cannot be at an edge: edges are
        # resident when the walk that found them ends.
        for row in above:
            if self._node(row).pinned:
                continue
            self._down[row] = self._walk(self._node(row), down=True)
            self._note(row)
        above_all = all(parent.resident for node in nodes for parent in node.parents)
        for row in below:
            if not (above_all and self._shorten(row, nodes)):
                self._up[row] = self._walk(self._node(row), down=False)
            self._note(row)
        self._costlier.difference_update(node.index for node in nodes)

    def pin(self, node: Node) -> None:
        row = node.index
        for edge in self._up[row].edge:
            self._down[edge].edge.discard(row)
        for edge in self._down[row].edge:
            self._up[edge].edge.discard(row)
        self._down[row] = _Region()
        self._up[row] = _Region()

    def forget(self, node: Node) -> None:
        row = node.index
        self._linked.discard(row)
        self._costlier.discard(row)
        down, up = self._down.pop(row), self._up.pop(row)
        for edge in up.edge:
            if edge in self._down:
                self._down[edge].edge.discard(row)
        for edge in down.edge:
            if edge in self._up:
                self._up[edge].edge.discard(row)
        if not node.resident:
            # Only a storage without live users is forgotten, so nothing lies below it, and the
            # resident storages above it lose exactly its own cost.
            for above in self._walk(node, down=False).edge:
                region = self._down[above]
                if row in region.inside:
                    region.inside.discard(row)
                    region.cost -= node.cost
                    self._note(above)

    def _node(self, row: int) -> Node:
        node = self._columns.nodes[row]
        assert node is not None
        return node

    def _note(self, row: int) -> None:
        cost = self._up[row].cost
        if not self._ancestors_only:
            cost += self._down[row].cost
        self._columns.around[row] = cost

    def _absorb(self, region: _Region, node: Node, inner: _Region) -> None:
        new = inner.inside - region.inside
        new.add(node.index)
        self.accesses += len(new)
        nodes = self._columns.nodes
        for row in new:
            member = nodes[row]
            assert member is not None
            region.cost += member.cost
        region.inside |= new
        region.edge.discard(node.index)
        region.edge |= inner.edge

    def _shorten(self, row: int, nodes: Sequence[Node]) -> bool:
        """Take storages that came back out of the region above `row`, where that needs no walk.

        Their parents are resident, so nothing else leaves the region with them.
        """
        up = self._up[row]
        if row in self._linked or not (self._linked.isdisjoint(up.inside)
                                       and self._costlier.isdisjoint(up.inside)):
            return False
        for node in nodes:
            if node.index not in up.inside:
                continue
            up.inside.discard(node.index)
            up.cost -= node.cost
            self.accesses += 1 + len(node.parents)
            if not node.pinned:
                up.edge.add(node.index)
            for parent in node.parents:
                if not parent.pinned and row not in self._down[parent.index].edge:
                    up.edge.discard(parent.index)
        return True

    def _walk(self, base: Node, *, down: bool) -> _Region:
        region = _Region()
        inside, edge = region.inside, region.edge
        cost = visits = 0
        stack = [base]
        while stack:
            node = stack.pop()
            for near in node.children if down else node.parents:
                visits += 1
                row = near.index
                if near.resident:
                    # What is pinned is never chosen, so its own regions are not kept.
                    if near is not base and not near.pinned:
                        edge.add(row)
                elif row not in inside:
                    cost += near.cost
                    inside.add(row)
                    stack.append(near)
        self.accesses += visits
        region.cost = cost
        return region


_WIDTH = 4
_NOTHING = 0


class EvictedClasses(Tracker):
    """The relaxed neighbourhood of the paper's section 4.1 and appendix C.2.

    Edge directions are forgotten. An evicted storage joins its evicted neighbours' classes; a
    rematerialized one takes its cost out of its class and leaves. Classes never split. A class keeps the cost
    that its member had when it joined.

    Each resident storage's row names the few classes next to it, so that a class's cost can change
    without visiting its border: a choice gathers the costs of all candidates in one pass. Rows
    change only where an edge or a merge touched them, and are brought up to date when a choice
    next needs them. Of two classes that merge, the one with the shorter border gives up its name.
    """

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        self._stale: set[int] = set()
        self._costs = np.zeros(256)
        self._used = 1
        self._free: list[int] = []
        self._near = np.zeros((len(columns.size), _WIDTH), dtype=np.int64)
        self._many: dict[int, list[int]] = {}

    def find(self, member: EvictedClass) -> EvictedClass:
        """Return the root of a class, halving paths on the way."""
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
