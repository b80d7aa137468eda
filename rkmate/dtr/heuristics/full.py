"""h_DTR: cost with the whole evicted neighbourhood, over size and staleness."""

from __future__ import annotations

from rkmate.dtr.heuristics.protocol import Ratio, Rows, Values
from rkmate.dtr.neighbourhood import EvictedRegions, Tracker
from rkmate.dtr.node import Node
from rkmate.dtr.pool import Columns


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
