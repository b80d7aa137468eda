"""h_LRU: the storage whose last access is longest ago."""

from __future__ import annotations

import numpy as np

from rkmate.dtr.heuristics.protocol import Ratio, Rows, Values
from rkmate.dtr.neighbourhood import NoNeighbourhood, Tracker
from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns


class LeastRecentlyUsed(Ratio):
    """The least last access time, which is the greatest staleness (paper, section 2)."""

    name = "lru"

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return node.last_access, 1

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        return columns.last_access[rows], np.ones(len(rows))
