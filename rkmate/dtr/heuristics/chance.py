"""h_rand: any storage."""

from __future__ import annotations

from rkmate.dtr.heuristics.protocol import seeded
from rkmate.dtr.neighbourhood import NoNeighbourhood, Tracker
from rkmate.dtr.pool import Columns, Pick, Pool


class Random:
    """A storage drawn evenly from the pool."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._source = seeded(seed)

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        rows = pool.rows()
        return Pick(int(rows[self._source.randrange(0, len(rows))]), False, 1)
