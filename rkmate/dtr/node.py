"""One storage, as the eviction algorithm sees it."""

from __future__ import annotations

import math


class EvictedClass:
    """A set of evicted storages that are connected, or were once."""

    __slots__ = ("up", "slot", "border")

    def __init__(self, slot: int) -> None:
        self.up: EvictedClass | None = None
        self.slot = slot
        """Where a root's cost stands in ``EvictedClasses``' array."""
        self.border: set[int] = set()
        """Rows of the resident storages next to a member (some may have left since)."""


class Node:
    """A storage: what is evicted and rematerialized as a whole (paper, appendix C.1).

    The simulator's and the online runtime's storages derive from it; heuristics and neighbourhoods
    see nothing else. Edges lead from a storage to those computed from it, views included; a storage
    is never its own neighbour.
    """

    __slots__ = (
        "index",
        "size",
        "cost",
        "last_access",
        "resident",
        "locks",
        "pinned",
        "parents",
        "children",
        "evicted_class",
    )

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        """Row of this storage in the pool's columns."""
        self.size = size
        """Bytes."""
        self.cost = 0
        """Time to compute it and every view ever made of it, in the log's unit (nanoseconds)."""
        self.last_access: float = -math.inf
        """Clock at the last operation that named it, in the same unit as ``cost``."""
        self.resident = False
        self.locks = 0
        """How many pending operations need it to stay."""
        self.pinned = False
        """Never evicted again; holds one lock for ever."""
        self.parents: set[Node] = set()
        self.children: set[Node] = set()
        self.evicted_class: EvictedClass | None = None
        """Kept by the neighbourhood of classes alone."""

    def evicted_neighbours(self) -> list[Node]:
        """The parents and children that are not in memory."""
        near = [node for node in self.parents if not node.resident]
        near += [
            node for node in self.children if not node.resident and node not in self.parents
        ]
        return near
