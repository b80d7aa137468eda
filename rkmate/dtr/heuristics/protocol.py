"""What a heuristic is: a score per storage, scored one by one or all at once."""

from __future__ import annotations

import math
import random
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rkmate.dtr.neighbourhood import Tracker
from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns, Pick, Pool, last_minimum

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


class Heuristic(Protocol):
    """Chooses the storage to evict next."""

    name: str
    """The name that the command line and the runtime take."""

    def tracker(self, columns: Columns) -> Tracker:
        """The neighbourhood whose costs this heuristic reads from ``columns.around``."""

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        """The member of ``pool`` to evict; the pool is not empty."""


class Ratio:
    """A heuristic whose score is a quotient; the least score is evicted.

    A subclass gives both parts twice: for one storage in exact Python numbers, and for rows of
    the columns at once.
    """

    name: str

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        """Numerator and denominator for one storage; ``around`` is its neighbourhood's cost."""
        raise NotImplementedError

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        """Numerators and denominators for ``rows``."""
        raise NotImplementedError

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        """The least score in ``pool``, as a scan in insertion order finds it."""
        rows = pool.rows()
        numerator, denominator = self.columns(columns, rows, clock)

        def exact(row: int) -> float:
            node = columns.nodes[row]
            assert node is not None
            above, below = self.parts(node, int(columns.around[row]), clock)
            return above / below if below > 0 else math.inf

        return last_minimum(rows, numerator, denominator, exact)


def seeded(seed: int) -> random.Random:
    """The source of random choices for ``seed``."""
    return random.Random(seed)
