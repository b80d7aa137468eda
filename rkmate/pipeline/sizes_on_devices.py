"""Other sizes under a budget that is a share of the device: plans with the fragments of its allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rkmate.budget import Budget
from rkmate.pipeline.attempts import Planned
from rkmate.pipeline.other_sizes import KnownPlan, plan_at_other_size
from rkmate.pipeline.prepare import Traced
from rkmate.pipeline.reserved import device_room, largest_that_fits


class _Unknown(Exception):
    """The known plans lead to none within a budget."""


def plan_that_fits(traced: Traced, budget: Budget, planner: str, known: Sequence[KnownPlan], *,
                   measured: bool) -> Planned | None:
    """`plan_at_other_size`, within what the device has free where the budget is a share of it. None where one
    has to be searched for."""
    found = plan_at_other_size(traced, budget, planner, known, measured=measured)
    if found is None or budget.device is None or budget.bytes is None:
        return found
    room = device_room(found.prepared, budget.device)
    if room is None:
        return found

    def planned_at(limit: int) -> Planned:
        if limit == budget.bytes:
            return found
        made = plan_at_other_size(traced, replace(budget, bytes=limit), planner, known, measured=measured)
        if made is None:
            raise _Unknown
        return made

    try:
        return largest_that_fits(budget.bytes, planned_at, room)
    except _Unknown:
        return None
