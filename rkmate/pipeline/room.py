"""The memory that measuring may take: what the step may take that is planned."""

from __future__ import annotations

from collections.abc import Callable

from rkmate.budget import Budget
from rkmate.measure.analytic import analytic_costs
from rkmate.measure.least import least_bytes
from rkmate.pipeline.checkpointed import limit_of
from rkmate.pipeline.prepare import Blocked, Prepared, with_operation_costs


def room_within(budget: Budget) -> Callable[[Blocked], int]:
    """The bytes that a budget leaves for measuring a graph. What a fraction is a part of is counted, as it is
    not measured yet."""
    def room(blocked: Blocked) -> int:
        if budget.bytes is not None:
            return budget.bytes
        costs = analytic_costs(blocked.partition)
        return limit_of(with_operation_costs(blocked, [costs[i] for i in range(len(costs))]), budget)
    return room


def wholly_measured(prepared: Prepared, limit: int) -> Prepared:
    """A graph with all operations measured, those too that have no room within the limit: for the smallest
    budget that has some. Measuring takes no more than the largest of them then."""
    least = least_bytes(prepared.partition)
    if prepared.settings.costs == "analytic" or least <= limit:
        return prepared
    return with_operation_costs(prepared.blocked, limit=lambda blocked: least)
