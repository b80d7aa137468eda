"""h_size: the largest storage."""

from __future__ import annotations

import numpy as np

from rkmate.dtr.heuristics.protocol import Ratio, Rows, Values
from rkmate.dtr.neighbourhood import NoNeighbourhood, Tracker
from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns


class Largest(Ratio):
    """``1 / size(S)`` (the GreedyRemat heuristic of Kumar et al. 2019; paper, section 2)."""

    name = "size"

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return 1, node.size

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        return np.ones(len(rows)), columns.size[rows]
