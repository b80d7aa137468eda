"""The eviction heuristics: which storage leaves memory next. `HEURISTICS` has all of them by name.

A heuristic gives each storage a score, one by one or for all at once, and evicts the least. The paper is
Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rkmate.dtr.neighbourhood import EvictedClasses, EvictedRegions, NoNeighbourhood, Tracker
from rkmate.dtr.pool import Columns, Node, Pick, Pool, last_minimum
from rkmate.errors import ArgumentError

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class Heuristic(Protocol):
    """Chooses the storage to evict next."""

    name: str
    """The name that the command line and the runtime take."""

    def tracker(self, columns: Columns) -> Tracker:
        """Return the neighbourhood whose costs this heuristic reads from ``columns.around``."""

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        """Return the member of ``pool`` to evict; the pool is not empty."""


class Ratio:
    """A heuristic whose score is a quotient; the least score is evicted.

    A subclass gives both parts twice: for one storage in exact Python numbers, and for rows of
    the columns at once.
    """

    name: str

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        """Return numerator and denominator for one storage. ``around``: the cost of its neighbourhood."""
        raise NotImplementedError

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        """Return numerators and denominators for ``rows``."""
        raise NotImplementedError

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        """Return the least score in ``pool``, as a scan in insertion order finds it."""
        rows = pool.rows()
        numerator, denominator = self.columns(columns, rows, clock)

        def exact(row: int) -> float:
            node = columns.nodes[row]
            assert node is not None
            above, below = self.parts(node, int(columns.around[row]), clock)
            return above / below if below > 0 else math.inf

        return last_minimum(rows, numerator, denominator, exact)


class Full(Ratio):
    """``(cost(S) + cost of e*(S)) / (size(S) * staleness(S))`` (paper, section 2, appendix C.3)."""

    name = "dtr"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedRegions(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return node.cost + around, node.size * (clock - node.last_access)

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        numerator = columns.cost[rows] + columns.around[rows]
        return numerator, columns.size[rows] * (clock - columns.last_access[rows])


class Classes(Full):
    """``(cost(S) + cost*(S)) / (size(S) * staleness(S))`` (paper, section 4.1, appendix C.3)."""

    name = "dtr-eq"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedClasses(columns)


class Local(Full):
    """``cost(S) / (size(S) * staleness(S))`` (paper, section 4.1, appendix C.3)."""

    name = "dtr-local"

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)


class LeastRecentlyUsed(Ratio):
    """The least last access time, which is the greatest staleness (paper, section 2)."""

    name = "lru"

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return node.last_access, 1

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        return columns.last_access[rows], np.ones(len(rows))


class Largest(Ratio):
    """``1 / size(S)`` (the GreedyRemat heuristic of Kumar et al. 2019; paper, section 2)."""

    name = "size"

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return 1, node.size

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        return np.ones(len(rows)), columns.size[rows]


class Neighbourhood(Ratio):
    """``(cost(S) + cost of e*(S)) / size(S)``: theorem 3.1's heuristic (paper, appendix A.3)."""

    name = "e*"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedRegions(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return node.cost + around, node.size

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        return columns.cost[rows] + columns.around[rows], columns.size[rows]


class MemorySavingPerSecond(Neighbourhood):
    """``(cost(S) + cost of S's evicted ancestors) / size(S)`` (Peng et al. 2020; paper, section 2)."""

    name = "msps"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedRegions(columns, ancestors_only=True)


class Random:
    """A storage drawn evenly from the pool."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._source = random.Random(seed)

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        rows = pool.rows()
        return Pick(int(rows[self._source.randrange(0, len(rows))]), False, 1)


HEURISTICS: dict[str, Callable[[int], Heuristic]] = {
    "dtr": lambda seed: Full(),
    "dtr-eq": lambda seed: Classes(),
    "dtr-local": lambda seed: Local(),
    "lru": lambda seed: LeastRecentlyUsed(),
    "size": lambda seed: Largest(),
    "msps": lambda seed: MemorySavingPerSecond(),
    "e*": lambda seed: Neighbourhood(),
    "random": lambda seed: Random(seed),
}
"""Makers by name; each takes the seed, which only ``random`` uses."""

_ALIASES = {
    "h_dtr": "dtr",
    "dtreqclass": "dtr-eq",
    "dtr_eq": "dtr-eq",
    "h_dtr-eq": "dtr-eq",
    "h_dtr_eq": "dtr-eq",
    "dtrlocal": "dtr-local",
    "dtr_local": "dtr-local",
    "h_dtr-local": "dtr-local",
    "h_dtr_local": "dtr-local",
    "h_lru": "lru",
    "largeststorage": "size",
    "h_size": "size",
    "h_msps": "msps",
    "h_e*": "e*",
    "e-star": "e*",
    "estar": "e*",
    "randomstorage": "random",
    "h_rand": "random",
    "h_random": "random",
}


def make_heuristic(name: str, seed: int = 0) -> Heuristic:
    """Make a fresh heuristic for one run.

    ``name`` is a key of ``HEURISTICS`` or one of the names that the paper and its simulator use,
    in any case. Raises ``ArgumentError`` for any other.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"heuristic must be a name, not {type(name).__name__}")
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in HEURISTICS:
        raise ArgumentError(f"heuristic {name!r} is unknown; known: {', '.join(HEURISTICS)}")
    return HEURISTICS[key](seed)
