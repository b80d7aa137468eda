"""The whole step with copies, where nothing is faster: known before the options of blocks are solved."""

from __future__ import annotations

from rkmate.pipeline.prepare import Prepared
from rkmate.planners.offload_search import whole_at_once
from rkmate.planners.protocol import Composed, Outcome, Planner


def sent_whole(prepared: Prepared, method: Planner, limit: int,
               time_limit: float | None) -> Outcome | None:
    """What a planner that may send data away makes of a budget, where what does not fit is copied away
    and nobody waits; None where that is not so, and options have to be solved. `time_limit`: seconds, of
    those that looking for copies may take anyway."""
    if prepared.graph.link is None or prepared.settings.calls != 1 or not isinstance(method, Composed):
        return None
    return whole_at_once(prepared.graph, prepared.whole, limit, prepared.settings.of_planner,
                         pinned=prepared.pinned, reserve_at_loss=prepared.reserve_at_loss,
                         time_limit=time_limit)
