"""Budgets that are refused before anything is measured.

To measure a large model takes a good part of its step. That a budget is far too small shows without: where
what one backward computation reads and makes, and the gradients that wait, have no room in any variant of the
graph, temporary memory would only be added to it.
"""

from __future__ import annotations

from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.errors import InfeasibleBudget
from rkmate.ir.gradients import least_memory
from rkmate.measure.analytic import analytic_costs
from rkmate.measure.costs import Costs
from rkmate.measure.unmeasured import with_ample_temporaries, with_likely_temporaries, without_temporaries
from rkmate.pipeline.checkpointed import limit_of
from rkmate.pipeline.prepare import Blocked, Prepared, block, with_operation_costs
from rkmate.pipeline.smallest import is_quick, lean_problem
from rkmate.pipeline.variants import Variant, others
from rkmate.planners.protocol import Planner, smallest_budget
from rkmate.support.gc_pause import gc_pause

LONG = 10.0
"""Seconds of a step, counted: of a shorter one all is measured in a few seconds, and the error says what was
measured."""


def refused_as_it_is(blocked: Blocked, method: Planner, limit: int) -> Prepared | None:
    """A variant with the least costs that it can have, where it has no schedule within a budget even so."""
    if not _is_asked(blocked, method):
        return None
    lean = _leanest(blocked, analytic_costs(blocked.partition))
    return lean if limit < _bound(lean) else None


@gc_pause()
def refuse_unmeasured(blocks: dict[Variant, Blocked], budget: Budget, method: Planner) -> None:
    """Raise `InfeasibleBudget` where every variant of a large graph is refused as it is. `blocks`: the first
    variant; others that were looked at are put there."""
    blocked, *_ = blocks.values()
    traced = blocked.traced
    if not _is_asked(blocked, method) or not devices.of(traced.device).cpu_kernels \
            or traced.settings.compile is True:
        return                  # nothing is counted of what other devices, or compiled groups, take
    counted = analytic_costs(blocked.partition)
    if sum(c.time for c in counted.values()) < LONG:
        return
    refused = [_leanest(blocked, counted)]
    limit = _most(refused[0], counted, budget)
    if limit is None or limit >= _bound(refused[0]):
        return
    for variant in others(traced.settings, blocked.concerned):
        blocks[variant] = block(traced, variant)
        lean = refused_as_it_is(blocks[variant], method, limit)
        if lean is None:
            return
        refused.append(lean)
    raise _error(refused, method, budget)


def _is_asked(blocked: Blocked, method: Planner) -> bool:
    settings = blocked.traced.settings
    return settings.costs == "measured" and settings.offload is None and is_quick(blocked, method)


def _leanest(blocked: Blocked, counted: Costs) -> Prepared:
    return with_operation_costs(blocked, without_temporaries(counted))


def _bound(prepared: Prepared) -> int:
    return least_memory(prepared.graph, prepared.pinned)


def _most(lean: Prepared, counted: Costs, budget: Budget) -> int | None:
    """The most bytes that a budget can be once costs are measured, where that matters; None: nobody knows.

    A fraction's whole grows with what operations take. If one takes much that is not counted (a convolution),
    it does so in every variant, and has to fit into the fraction itself: then the whole grows by no more than
    the fraction. Others are in some variants alone, and what these take is bounded.
    """
    if budget.fraction is None:
        return limit_of(lean, budget)
    blocked = lean.blocked
    if budget.fraction >= 1 or any(v.channels_last for v in others(lean.settings, blocked.concerned)):
        return None             # another layout has other convolutions
    ample = with_operation_costs(blocked, with_ample_temporaries(blocked.partition, counted))
    return max(limit_of(ample, budget), int(limit_of(lean, budget) / (1 - budget.fraction)) + 1)


def _error(refused: list[Prepared], method: Planner, budget: Budget) -> InfeasibleBudget:
    """`refused`: of the first variant, then of the others."""
    whole = _likely(refused[0].blocked)
    limit = limit_of(whole, budget)
    bounds = [_bound(lean) for lean in refused]
    met: list[int] = []
    for bound, lean in sorted(zip(bounds, refused, strict=True), key=lambda pair: pair[0]):
        if not met or bound < min(met):
            likely = whole if lean is refused[0] else _likely(lean.blocked)
            found = smallest_budget(method, lean_problem(likely), limit)
            met += [] if found is None else [found]
    beside = whole.beside
    limit, least, smallest, peak = (n + beside for n in (limit, min(bounds), min(met), whole.baseline_peak))
    return InfeasibleBudget(
        f"no schedule fits in {limit:,} bytes: at least {least:,} bytes are read and made at once. Nothing "
        f"was measured to know that; as counted, the smallest budget that {method.name} meets is "
        f"{smallest:,} bytes ({smallest / peak:.0%} of its own peak of {peak:,} bytes)", smallest)


def _likely(blocked: Blocked) -> Prepared:
    counted = analytic_costs(blocked.partition)
    return with_operation_costs(blocked, with_likely_temporaries(blocked.partition, counted))
