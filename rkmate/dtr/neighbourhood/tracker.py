"""What every neighbourhood tracker is told, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rkmate.dtr.node import Node
from rkmate.dtr.pool import Pool


class Tracker(Protocol):
    """Keeps ``Columns.around``: the cost of each evictable storage's evicted neighbourhood."""

    accesses: int
    """Storages visited so far to keep the metadata (paper, appendix D.3)."""

    def appear(self, node: Node) -> None:
        """An operation that will compute ``node`` for the first time is pending."""

    def link(self, node: Node) -> None:
        """A pending view of ``node`` gave it more parents."""

    def costlier(self, node: Node) -> None:
        """A pending view of ``node`` raised its cost."""

    def born(self, node: Node) -> None:
        """``node`` was computed for the first time, while all its parents were in memory."""

    def evict(self, node: Node) -> None:
        """``node`` has just left memory."""

    def materialize(self, nodes: Sequence[Node]) -> None:
        """One operation has just brought ``nodes`` into memory."""

    def pin(self, node: Node) -> None:
        """``node``, in memory, will not be chosen any more; its edges are still there."""

    def forget(self, node: Node) -> None:
        """``node`` leaves the graph for ever; its edges are still there."""

    def refresh(self, pool: Pool) -> None:
        """Bring the column up to date for the members of ``pool``."""
