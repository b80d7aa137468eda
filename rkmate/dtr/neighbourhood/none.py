"""No neighbourhood: for heuristics that look at a storage alone."""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns, Pool


class NoNeighbourhood:
    """Leaves every neighbourhood's cost at 0."""

    def __init__(self, columns: Columns) -> None:
        self.accesses = 0

    def appear(self, node: Node) -> None:
        return

    def link(self, node: Node) -> None:
        return

    def costlier(self, node: Node) -> None:
        return

    def born(self, node: Node) -> None:
        return

    def evict(self, node: Node) -> None:
        return

    def materialize(self, nodes: Sequence[Node]) -> None:
        return

    def pin(self, node: Node) -> None:
        return

    def forget(self, node: Node) -> None:
        return

    def refresh(self, pool: Pool) -> None:
        return
