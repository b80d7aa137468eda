"""h_DTR-eq: as h_DTR, with the evicted neighbourhood approximated by a union-find."""

from __future__ import annotations

from rkmate.dtr.heuristics.full import Full
from rkmate.dtr.neighbourhood import EvictedClasses, Tracker
from rkmate.dtr.pool import Columns


class Classes(Full):
    """``(cost(S) + cost*(S)) / (size(S) * staleness(S))`` (paper, section 4.1, appendix C.3)."""

    name = "dtr-eq"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedClasses(columns)
