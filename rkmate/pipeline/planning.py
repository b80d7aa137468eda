"""The one way to plan: a captured model and a budget in, a plan out.

What every public function does, `rkmate.runtime` included: trace, block, costs, and for a budget below the
model's own peak options, chain and a planner's search; then the same of each other variant of the graph that
may be faster.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from rkmate.budget import Budget
from rkmate.errors import ArgumentError
from rkmate.ir.kernels import seconds_to_save
from rkmate.ir.plan import Run
from rkmate.pipeline import deferred_outputs, offload
from rkmate.pipeline.bounds import seconds_of_any
from rkmate.pipeline.chains import Solved, solve
from rkmate.pipeline.checkpointed import limit_of, note_of, tell
from rkmate.pipeline.compiled import compiled_by, fused_in
from rkmate.pipeline.larger_tiles import with_larger_tiles
from rkmate.pipeline.prepare import Blocked, Prepared, Traced, block, prepare
from rkmate.pipeline.reserved import device_room, largest_that_fits
from rkmate.pipeline.room import room_within
from rkmate.pipeline.runs import runs_of, runs_of_operations
from rkmate.pipeline.sent_whole import sent_whole
from rkmate.pipeline.smallest import Refused, error_of_all, lean_schedule, refused_at_once, smallest_of
from rkmate.pipeline.summarise import summarise
from rkmate.pipeline.unmeasured import refuse_unmeasured, refused_as_it_is
from rkmate.pipeline.variants import Variant, first, is_faster, may_be_faster, others
from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner, ask, best, found_in
from rkmate.planners.registry import planner as find_planner
from rkmate.planners.several_calls import ask_for_calls
from rkmate.show.plan import Plan
from rkmate.support.gc_pause import gc_pause
from rkmate.support.warn import warn

DEFAULT = "rockmate"
"""The planner that is taken unless a caller names one."""
CURVE = 10
"""Budgets of a curve, unless the caller names them."""


Orders = tuple[tuple[tuple[int, ...], ...], ...]
"""Per class of blocks, the backward orders of its options."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the variant of the graph that it runs over, for code to be generated."""

    plan: Plan
    prepared: Prepared
    orders: Orders = ()
    """Of the options that were solved for it; empty where none were."""


@dataclass(frozen=True)
class Attempt:
    """What one planner made of one budget."""

    plan: Plan | None
    """None unless the status is ok."""
    status: Literal["ok", "infeasible", "timeout"]
    note: str
    found: tuple[Candidate, ...] = ()
    """Schedules for other budgets to know."""


def make_plan(traced: Traced, budget: Budget, planner: str) -> Planned:
    """The fastest plan that a planner finds within a budget, over the variants of the graph.

    Where the first variant's step fits whole, it is taken, unless the user asked for others. A fraction is
    one of the peak of the first variant, which ``Settings.fraction_of`` chooses where the model checkpoints.

    On a device with a caching allocator, fragments count, too: a budget that is a share of the device has to
    hold them, and where others leave many, there is a warning.

    Raises:
        InfeasibleBudget: the planner has a schedule within a larger budget only, in every variant; it says
            the smallest of those budgets.
        PlanningTimeout: its time was over before it found one.
        ArgumentError: it has no schedule for this model at any budget.
    """
    blocked = block(traced)
    blocks = {blocked.variant: blocked}
    refuse_unmeasured(blocks, budget, find_planner(planner, traced.settings.of_planner))
    prepared = prepare(traced, blocked=blocked, limit=room_within(budget))
    tell(prepared, budget)
    limit = limit_of(prepared, budget)
    room = device_room(prepared, budget.device)
    if room is None or budget.device is None:
        planned = _compared(prepared, limit, planner, blocks)
        if room is not None:
            room.tell(planned)
        return planned
    return largest_that_fits(limit, lambda least: _compared(prepared, least, planner), room)


def plan_prepared(prepared: Prepared, limit: int, planner: str = DEFAULT) -> Plan:
    """The same of a prepared first variant. Raises what `make_plan` raises."""
    return _compared(prepared, limit, planner).plan


def _compared(prepared: Prepared, limit: int, planner: str,
              blocks: Mapping[Variant, Blocked] = MappingProxyType({})) -> Planned:
    """`blocks`: of variants that were looked at before."""
    blocked, traced = prepared.blocked, prepared.blocked.traced
    method = find_planner(planner, traced.settings.of_planner)
    taken: Planned | None = None
    before: Plan | None = None
    refused: list[Refused] = []
    spent = {blocked.variant: sum(prepared.stage_seconds.values()) - traced.seconds}
    for variant in (blocked.variant, *others(traced.settings, blocked.concerned)):
        start, here = time.perf_counter(), prepared
        if variant is not blocked.variant:
            if taken is not None and not _may_win(taken.plan, prepared, limit, variant):
                continue
            cut = blocks.get(variant) or block(traced, variant)
            lean = refused_as_it_is(cut, method, limit) if taken is None else None
            if lean is not None:
                refused.append(Refused(lean, limit, measured=False))
                spent[variant] = time.perf_counter() - start
                continue
            here = prepare(traced, blocked=cut, limit=lambda blocked: limit)
        if taken is None or _is_worth_solving(taken.plan, here, method, limit):
            found = _fastest(here, method, limit)
            if isinstance(found, Refused):
                refused.append(found)
            elif taken is None or _wins(found.plan, taken.plan, before, variant):
                taken = found
            if variant is blocked.variant and taken is not None:
                before = taken.plan
        spent[variant] = spent.get(variant, 0.0) + time.perf_counter() - start
    if taken is None:
        raise error_of_all(refused, method)
    rest = sum(seconds for variant, seconds in spent.items() if variant is not taken.prepared.blocked.variant)
    plan = _against(taken.plan, before, prepared)
    if len(spent) > 1:
        plan = replace(plan, stage_seconds={**plan.stage_seconds, "other variants": rest})
    warn_of(taken.prepared, _reason(taken.plan, before))
    return replace(taken, plan=plan)


def _may_win(plan: Plan, prepared: Prepared, limit: int, variant: Variant) -> bool:
    """Whether another variant is worth preparing, beside a plan of the first one or of another. How long
    other kernels take is not known before."""
    if variant.takes_longer or (variant.saves_memory and prepared.baseline_peak <= limit):
        return False
    return variant.channels_last != prepared.blocked.variant.channels_last \
        or may_be_faster(plan.step_seconds, prepared.graph, variant)


def _is_worth_solving(plan: Plan, prepared: Prepared, method: Planner, limit: int) -> bool:
    """Whether a variant that is prepared can be faster than a plan, by what no schedule of it does better."""
    variant, seconds = prepared.blocked.variant, plan.step_seconds
    return may_be_faster(seconds, prepared.graph, variant) and (
        _fits(prepared, method, limit) or is_faster(seconds_of_any(prepared, limit), seconds, variant))


def _wins(plan: Plan, taken: Plan, before: Plan | None, variant: Variant) -> bool:
    """Whether a variant's plan is taken in the place of the fastest so far. `before`: the first variant's."""
    return plan.step_seconds < taken.step_seconds and (
        before is None or is_faster(plan.step_seconds, before.step_seconds, variant))


def _against(plan: Plan, before: Plan | None, prepared: Prepared) -> Plan:
    """A plan beside the first variant's, and the first variant's step without rematerialization."""
    plan = replace(plan, baseline_peak_bytes=prepared.baseline_peak,
                   baseline_seconds=prepared.baseline.seconds)
    if before is None or plan.variant == before.variant:
        return plan
    known = [p.minimum_bytes for p in (plan, before) if p.minimum_bytes is not None]
    return replace(plan, note=f"{plan.note}; {_share(plan, before)} faster than the fastest schedule of the "
                              "original's operations", minimum_bytes=min(known, default=None))


def _share(plan: Plan, before: Plan) -> str:
    return f"{1 - plan.step_seconds / before.step_seconds:.1%}"


def _reason(plan: Plan, before: Plan | None) -> tuple[str, str]:
    """Why a variant was taken, and what the settings that forbid it lead to."""
    if before is None:
        return "nothing fits in this budget with the original's operations", "refuses such budgets"
    return (f"this is {_share(plan, before)} faster than the fastest schedule of the original's operations "
            "within this budget", "keeps its bits")


def smallest_peak_of(prepared: Prepared, above: int) -> int:
    """The smallest budget that the default planner is known to meet, in bytes, on the first variant, or where
    that needs more than `above`, on any."""
    method = find_planner(DEFAULT, prepared.settings.of_planner)
    blocked, least = prepared.blocked, prepared.baseline_peak
    for variant in (blocked.variant, *others(prepared.settings, blocked.concerned)):
        here = prepared if variant is blocked.variant else prepare(blocked.traced, variant)
        at_once = refused_at_once(here, method, above)
        found = smallest_of(solve(here), method, above) if at_once is None else at_once.least
        assert found is not None
        least = min(least, found)
        if least <= above:
            break
    return least


def make_curve(traced: Traced, budgets: Sequence[Budget] | None, planner: str) -> list[Plan]:
    """A plan for each budget, as `make_plan` finds them; what is found for one serves the others, too, so
    that more memory is never slower (but for what a variant must be faster by). Without budgets: for ten
    between the first variant's peak and the smallest of any. Raises what `make_plan` raises."""
    prepared = prepare(traced)
    blocked, method = prepared.blocked, find_planner(planner, traced.settings.of_planner)
    variants = (blocked.variant, *others(traced.settings, blocked.concerned))
    made = {blocked.variant: prepared}
    known: dict[Variant, Solved] = {}

    def prepared_of(variant: Variant) -> Prepared:
        if variant not in made:
            made[variant] = prepare(traced, variant)
        return made[variant]

    def solved_of(variant: Variant) -> Solved:
        if variant not in known:
            known[variant] = solve(prepared_of(variant))
        return known[variant]

    if budgets is None:
        lows = [low for v in variants if (low := smallest_of(solved_of(v), method, 0)) is not None]
        if not lows:
            raise ArgumentError(f"planner is {method.name!r}, which has no schedule for this model at any "
                                "budget: take another one")
        low, high = min(lows), prepared.baseline_peak
        limits = [low + (high - low) * k // (CURVE - 1) for k in range(CURVE - 1, -1, -1)]
    else:
        limits = [limit_of(prepared, budget) for budget in budgets]
    before: dict[int, Plan] = {}
    plans: dict[int, Plan] = {}
    refused: dict[int, list[Refused]] = {}
    for variant in variants:
        todo = sorted(set(limits) if variant is blocked.variant else {
            n for n in limits if n not in plans or _may_win(plans[n], prepared, n, variant)})
        if not todo:
            continue
        here = prepared_of(variant)
        solved = None if _all_fit(here, method, todo) else solved_of(variant)
        found, errors = _curve(here, solved, method, todo)
        if variant is blocked.variant:
            before = dict(found)
        plans |= {n: plan for n, plan in found.items()
                  if n not in plans or _wins(plan, plans[n], before.get(n), variant)}
        for limit, error in errors.items():
            refused.setdefault(limit, []).append(error)
    for limit in sorted(set(limits) - set(plans)):
        raise error_of_all(refused[limit], method)
    for variant in variants:
        for limit in sorted(n for n, plan in plans.items() if plan.variant == variant.name)[:1]:
            warn_of(prepared_of(variant), _reason(plans[limit], before.get(limit)))
    return [_against(plans[limit], before.get(limit), prepared) for limit in limits]


def _curve(prepared: Prepared, solved: Solved | None, method: Planner, limits: Sequence[int],
           ) -> tuple[dict[int, Plan], dict[int, Refused]]:
    """Plans for budgets from the smallest to the largest, and those that are refused."""
    known: list[Candidate] | None = None
    attempts: dict[int, Attempt] = {}
    refused: dict[int, Refused] = {}
    for limit in limits:
        attempt = attempts[limit] = attempted(prepared, solved, method, limit, known=known)
        if attempt.plan is None:
            refused[limit] = Refused(prepared, limit, solved, attempt.status == "timeout", attempt.note)
        if not _fits(prepared, method, limit):
            known = [*(known or ()), *attempt.found]
    plans = {limit: _in_larger_tiles(a.plan, prepared, method, limit)
             for limit, a in attempts.items() if a.plan is not None}
    for limit, plan in plans.items():
        if solved is not None and isinstance(method, Composed):
            outcome = best(known or (), limit)
            if outcome.schedule is None:
                continue
            other = plan_of(solved.prepared, solved, method.name, limit,
                            replace(outcome, smallest=plan.minimum_bytes))
            if other.step_seconds < plan.step_seconds:
                plans[limit] = replace(other, bound_seconds=plan.bound_seconds)
    if isinstance(method, Composed):
        # Kernels are chosen for each schedule: what was slower before may be the faster one.
        for smaller, limit in itertools.pairwise(plans):
            if plans[smaller].step_seconds < plans[limit].step_seconds:
                plans[limit] = replace(plans[smaller], budget_bytes=limit,
                                       bound_seconds=plans[limit].bound_seconds)
    return plans, refused


def _fastest(prepared: Prepared, method: Planner, limit: int) -> Planned | Refused:
    """A plan of one variant for one budget alone."""
    found = _whole_or_searched(prepared, method, limit)
    return found if isinstance(found, Refused) else \
        replace(found, plan=_in_larger_tiles(found.plan, prepared, method, limit))


def _in_larger_tiles(plan: Plan, prepared: Prepared, method: Planner, limit: int) -> Plan:
    def search(larger: Prepared) -> Plan | None:
        found = _whole_or_searched(larger, method, limit)
        return None if isinstance(found, Refused) else found.plan

    return with_larger_tiles(plan, prepared, limit, search) if isinstance(method, Composed) else plan


def _whole_or_searched(prepared: Prepared, method: Planner, limit: int) -> Planned | Refused:
    """The same by the leanest kernels first. Where a composed planner's budget holds the whole step, or is
    clearly too small, no integer program is solved."""
    whole = _fits(prepared, method, limit)
    at_once = None if whole else refused_at_once(prepared, method, limit)
    if at_once is not None:
        return at_once
    sent = None if whole else sent_whole(prepared, method, limit)
    if sent is not None:
        return Planned(plan_of(prepared, None, method.name, limit, sent), prepared)
    solved = None if whole else solve(prepared)
    attempt = attempted(prepared, solved, method, limit)
    if attempt.plan is None:
        return Refused(prepared, limit, solved, attempt.status == "timeout", attempt.note)
    return Planned(attempt.plan, prepared, () if solved is None else _orders(solved))


def _orders(solved: Solved) -> Orders:
    by_class = dict(zip(solved.prepared.blocked.classes, solved.options, strict=True))
    return tuple(tuple(option.backward for option in by_class[k]) for k in range(len(by_class)))


def _fits(prepared: Prepared, method: Planner, limit: int) -> bool:
    """Whether a planner runs the whole step within a budget, whatever the options of blocks are."""
    return isinstance(method, Composed) and prepared.baseline_peak <= limit


def _all_fit(prepared: Prepared, method: Planner, limits: Sequence[int]) -> bool:
    return all(_fits(prepared, method, limit) for limit in limits)


@gc_pause()
def attempted(prepared: Prepared, solved: Solved | None, method: Planner, limit: int, *,
              time_limit: float | None = None, known: Sequence[Candidate] | None = None) -> Attempt:
    """What a planner finds within `limit` bytes; that it finds nothing is a result, too.

    `solved`: may be None where the planner is a composed one and the whole step fits. `time_limit`:
    seconds of planning, the settings' unless given. `known`: schedules found for other budgets; None at
    the first one.
    """
    if _fits(prepared, method, limit):
        each_once = sum(c.time for c in prepared.graph.c)
        outcome = Outcome(prepared.whole, "ok", prepared.baseline.seconds, bound=each_once,
                          note="nothing needs to be recomputed")
        return Attempt(plan_of(prepared, None, method.name, limit, outcome), "ok", outcome.note)
    assert solved is not None
    start = time.perf_counter()
    seconds, calls = prepared.settings.planning_seconds if time_limit is None else time_limit, \
        prepared.settings.calls
    if calls == 1:
        outcome = ask(method, solved.problem, limit, known=known, time_limit=seconds)
        found = found_in(solved.problem, outcome)
    else:
        outcome = ask_for_calls(method, solved.problem, calls, limit, known=known, time_limit=seconds)
        found = outcome.others
    if outcome.schedule is None:
        outcome = lean_schedule(prepared, method, limit) or outcome
    if outcome.schedule is None:
        status: Literal["infeasible", "timeout"] = "timeout" if outcome.status == "timeout" else "infeasible"
        return Attempt(None, status, outcome.note, found)
    searched = replace(solved, stage_seconds={**solved.stage_seconds,
                                              "search": time.perf_counter() - start})
    return Attempt(plan_of(prepared, searched, method.name, limit, outcome), "ok", outcome.note, found)


def plan_of(prepared: Prepared, solved: Solved | None, name: str, limit: int, outcome: Outcome) -> Plan:
    """The plan of an outcome that has a schedule, with the fastest kernels that there is room for.
    `solved`: None where no options were solved for it."""
    assert outcome.schedule is not None
    blocked, parts = prepared.blocked, prepared.partition
    whole = prepared.baseline
    calls = prepared.settings.calls
    schedule = prepared.with_kernels(outcome.schedule, limit if calls == 1 else 0)
    if prepared.peak(schedule, calls) > limit:
        schedule = outcome.schedule             # they leave the peak of one call alone as it is
    result = prepared.simulate(schedule)
    # Of schedules whose computations all go part by part, as planners see them.
    bound = None if outcome.bound is None else max(0.0, outcome.bound - seconds_to_save(prepared.graph))
    if bound is not None and math.isclose(bound, result.seconds):
        bound = min(bound, result.seconds)      # the same numbers, added up in another order
    runs: Sequence[Run]
    if solved is None or not outcome.ops or any(op.save_index is not None for op in outcome.ops):
        runs = tuple(runs_of(outcome.schedule, prepared.graph, parts.block_of))
    else:
        runs = tuple(runs_of_operations(outcome.ops, solved.options))
    return Plan(
        planner=name, budget_bytes=limit, peak_bytes=prepared.peak(schedule, calls),
        baseline_peak_bytes=prepared.baseline_peak,
        step_seconds=result.seconds, baseline_seconds=whole.seconds, bound_seconds=bound,
        minimum_bytes=outcome.smallest, blocks=prepared.infos if solved is None else solved.infos,
        runs=runs, schedule=schedule, fingerprint=blocked.fingerprint,
        costs=tuple(prepared.costs[i] for i in range(len(prepared.graph.c))),
        graph=solved.summary if solved else summarise(prepared),
        note=_note(prepared, outcome.note), variant=blocked.variant.name, calls=calls,
        deferred=deferred_outputs.names_of(blocked),
        gradients=prepared.settings.gradients, compiled=compiled_by(prepared.settings),
        fused=fused_in(parts.program.operation),
        stage_seconds=dict((solved or prepared).stage_seconds), nodes=dict(blocked.nodes),
        origin=blocked.traced.origin)


def _note(prepared: Prepared, note: str) -> str:
    blocked = prepared.blocked
    variant = blocked.variant.notes(blocked.concerned)
    return "; ".join(part for part in (note, variant, deferred_outputs.note_of(blocked), note_of(prepared),
                                      offload.note_of(prepared.graph.link, prepared.settings.costs))
                     if part)


def warn_of(prepared: Prepared, reason: tuple[str, str]) -> None:
    """Say which variant was taken, where it is not the settings' first. `reason`: why, and what the settings
    that forbid it lead to."""
    blocked = prepared.blocked
    always = first(blocked.traced.settings).rows
    if any(row.trades and not row.asked_for and row not in always for row in blocked.variant.rows):
        warn(blocked.variant.warning(*reason, blocked.concerned))
