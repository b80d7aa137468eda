"""Storages as the eviction algorithm sees them, and the pool of the evictable ones.

The pool keeps them in the order in which they became evictable, and their scores' columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class EvictedClass:
    """A set of evicted storages that are connected, or were once."""

    __slots__ = ("up", "slot", "border")

    def __init__(self, slot: int) -> None:
        self.up: EvictedClass | None = None
        self.slot = slot
        """Position of a root's cost in the array of ``EvictedClasses``."""
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
        """Number of pending operations that need the member to stay."""
        self.pinned = False
        """Never evicted again; holds one lock for ever."""
        self.parents: set[Node] = set()
        self.children: set[Node] = set()
        self.evicted_class: EvictedClass | None = None
        """Kept by the neighbourhood of classes alone."""

    def evicted_neighbours(self) -> list[Node]:
        """Return the parents and children that are not in memory."""
        near = [node for node in self.parents if not node.resident]
        near += [
            node for node in self.children if not node.resident and node not in self.parents
        ]
        return near


_FIRST_ROWS = 1024


class Columns:
    """Size, cost and last access of every storage, one row each, for vectorised scores.

    Numbers are stored as float64: integers below 2**53 are exact in it.
    """

    def __init__(self) -> None:
        self.nodes: list[Node | None] = []
        self.size = np.zeros(_FIRST_ROWS)
        self.cost = np.zeros(_FIRST_ROWS)
        self.last_access = np.zeros(_FIRST_ROWS)
        self.around = np.zeros(_FIRST_ROWS)
        """Cost of each storage's evicted neighbourhood, kept by a neighbourhood tracker."""
        self._free: list[int] = []

    def claim(self) -> int:
        """Return a row for a new storage."""
        if self._free:
            return self._free.pop()
        row = len(self.nodes)
        if row == len(self.size):
            for name in ("size", "cost", "last_access", "around"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(len(old))]))
        self.nodes.append(None)
        return row

    def add(self, node: Node) -> None:
        """Fill the row of ``node`` from its attributes."""
        row = node.index
        self.nodes[row] = node
        self.size[row] = node.size
        self.cost[row] = node.cost
        self.last_access[row] = node.last_access
        self.around[row] = 0.0

    def release(self, node: Node) -> None:
        """Give the row of a storage that is gone to a later one."""
        self.nodes[node.index] = None
        self._free.append(node.index)

    def touch(self, node: Node, clock: int) -> None:
        """Note that an operation names ``node`` at ``clock``."""
        node.last_access = clock
        self.last_access[node.index] = clock

    def add_cost(self, node: Node, cost: int) -> None:
        """Add the time of one more operation that produces a part of ``node``."""
        node.cost += cost
        self.cost[node.index] = node.cost


class Pick(NamedTuple):
    """The row of the storage to evict next."""

    row: int
    tied: bool
    """Whether another candidate had an equal score, so that the order of the pool decided."""
    scanned: int
    """Candidates whose score a scan of the pool in order would have read."""


class Pool:
    """The evictable storages in insertion order (the paper's ``R.pool``, appendix C.4).

    A storage is appended when it is (re)materialized or unlocked, and removed when it is locked or
    evicted. Entries are kept in one array with gaps, squeezed when half of it is gaps, so that
    appending and removing take constant time and a scan is one vectorised pass.
    """

    def __init__(self) -> None:
        self._rows = np.full(_FIRST_ROWS, -1, dtype=np.int64)
        self._end = 0
        self._place: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, node: Node) -> bool:
        return node.index in self._place

    def append(self, node: Node) -> None:
        """Add ``node`` at the end; nothing happens when it is in the pool."""
        row = node.index
        if row in self._place:
            return
        if self._end == len(self._rows):
            self._squeeze()
        self._rows[self._end] = row
        self._place[row] = self._end
        self._end += 1

    def remove(self, node: Node) -> None:
        """Take ``node`` out; nothing happens when it is not in the pool."""
        place = self._place.pop(node.index, None)
        if place is not None:
            self._rows[place] = -1

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the members' rows in insertion order."""
        used = self._rows[: self._end]
        return used[used >= 0]

    def _squeeze(self) -> None:
        alive = self.rows()
        length = max(_FIRST_ROWS, 2 * len(alive))
        self._rows = np.full(length, -1, dtype=np.int64)
        self._rows[: len(alive)] = alive
        self._end = len(alive)
        self._place = {int(row): place for place, row in enumerate(alive)}


_EXACT = float(2**53)
_NEAR = 1e-12


def last_minimum(
    rows: npt.NDArray[np.int64],
    numerator: npt.NDArray[np.float64] | int,
    denominator: npt.NDArray[np.float64] | int,
    exact: Callable[[int], float],
) -> Pick:
    """Return the row with the least ``numerator / denominator``, as a scan in pool order finds it.

    The last minimum wins; the scan stops at the first score of 0; a denominator of 0 or less
    gives infinity. ``exact(row)`` returns the score from Python integers: it decides between rows
    where the products in ``denominator`` exceed what float64 holds exactly. ``rows`` must not be
    empty.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(denominator > 0, numerator / denominator, math.inf)
    zeros = np.flatnonzero(scores == 0.0)
    if len(zeros):
        scores = scores[: int(zeros[0]) + 1]
    scanned = len(scores)
    least = float(scores.min())
    if least == math.inf:
        return Pick(int(rows[-1]), scanned > 1, scanned)
    if float(np.max(denominator)) < _EXACT and float(np.max(np.abs(numerator))) < _EXACT:
        ties = np.flatnonzero(scores == least)
        return Pick(int(rows[ties[-1]]), len(ties) > 1, scanned)
    best, winner, count = math.inf, -1, 0
    for place in np.flatnonzero(scores <= least + abs(least) * _NEAR):
        score = exact(int(rows[place]))
        if score < best:
            best, winner, count = score, int(place), 1
        elif score == best:
            winner, count = int(place), count + 1
    return Pick(int(rows[winner]), count > 1, scanned)
