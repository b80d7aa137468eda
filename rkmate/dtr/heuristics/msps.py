"""h_MSPS: memory saved per second of recomputation."""

from __future__ import annotations

from rkmate.dtr.heuristics.neighbourhood import Neighbourhood
from rkmate.dtr.neighbourhood import EvictedRegions, Tracker
from rkmate.dtr.pool import Columns


class MemorySavingPerSecond(Neighbourhood):
    """``(cost(S) + cost of S's evicted ancestors) / size(S)`` (Peng et al. 2020; paper, section 2)."""

    name = "msps"

    def tracker(self, columns: Columns) -> Tracker:
        return EvictedRegions(columns, ancestors_only=True)
