"""h_DTR-local: as h_DTR, without a neighbourhood."""

from __future__ import annotations

from rkmate.dtr.heuristics.full import Full
from rkmate.dtr.neighbourhood import NoNeighbourhood, Tracker
from rkmate.dtr.pool import Columns


class Local(Full):
    """``cost(S) / (size(S) * staleness(S))`` (paper, section 4.1, appendix C.3)."""

    name = "dtr-local"

    def tracker(self, columns: Columns) -> Tracker:
        return NoNeighbourhood(columns)
