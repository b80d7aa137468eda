"""The exact evicted neighbourhood e*: evicted ancestors and evicted descendants."""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns, Pool


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


class EvictedRegions:
    """The evicted neighbourhood of the paper's appendix C.2, cached as in appendix C.5.

    Ancestors and descendants are kept apart. An eviction merges the evicted storage's own region
    into those of the storages at its edge; a rematerialization walks the graph anew for the
    storages at the edge of what came back. With ``ancestors_only`` the column holds the cost of
    the evicted ancestors, which is what MSPS needs.
    """

    def __init__(self, columns: Columns, *, ancestors_only: bool = False) -> None:
        self.accesses = 0
        self._columns = columns
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
            # The program let go of it: it has no regions of its own.
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

    def refresh(self, pool: Pool) -> None:
        return

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
