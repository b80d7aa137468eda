"""h_e*: cost with the whole evicted neighbourhood, over size; staleness plays no part."""

from __future__ import annotations

from rkmate.dtr.heuristics.protocol import Ratio, Rows, Values
from rkmate.dtr.neighbourhood import EvictedRegions, Tracker
from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns


class Neighbourhood(Ratio):
    """``(cost(S) + cost of e*(S)) / size(S)``: theorem 3.1's heuristic (paper, appendix A.3)."""

    name = "e*"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedRegions(columns)

    def parts(self, node: Node, around: int, clock: int) -> tuple[float, float]:
        return node.cost + around, node.size

    def columns(self, columns: Columns, rows: Rows, clock: int) -> tuple[Values, Values]:
        return columns.cost[rows] + columns.around[rows], columns.size[rows]
