"""The one way to plan: a captured model and a budget in, a plan out.

What every public function does, `rkmate.runtime` included: trace, block, costs, and for a budget below the
model's own peak options, chain and a planner's search; where that finds nothing, the next variant of the
graph.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rkmate.budget import Budget
from rkmate.errors import ArgumentError, InfeasibleBudget, PlanError, PlanningTimeout, ScheduleError
from rkmate.ir.kernels import seconds_to_save
from rkmate.ir.plan import Run
from rkmate.pipeline.chains import Solved, solve
from rkmate.pipeline.checkpointed import limit_of, note_of, tell
from rkmate.pipeline.prepare import Blocked, Prepared, Traced, block, prepare, with_operation_costs
from rkmate.pipeline.room import room_within, wholly_measured
from rkmate.pipeline.runs import runs_of, runs_of_operations
from rkmate.pipeline.summarise import summarise
from rkmate.pipeline.variants import VARIANTS, Variant, fallbacks, first, named
from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner, ask, best, found_in
from rkmate.planners.registry import planner as find_planner
from rkmate.planners.several_calls import ask_for_calls, smallest_steps
from rkmate.planners.smallest import smallest_budget
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
    """The fastest plan that a planner finds within a budget: of the first variant of the graph that has one.

    A fraction is one of the peak of the first variant, which ``Settings.fraction_of`` chooses where the model
    checkpoints.

    Raises:
        InfeasibleBudget: the planner has a schedule within a larger budget only, in every variant; it says
            the smallest of those budgets.
        PlanningTimeout: its time was over before it found one.
        ArgumentError: it has no schedule for this model at any budget.
    """
    start = time.perf_counter()
    prepared = prepare(traced, limit=room_within(budget))
    limit = limit_of(prepared, budget)
    tell(prepared, budget)
    method = find_planner(planner, traced.settings.of_planner)
    refused: list[InfeasibleBudget] = []
    for variant in (prepared.blocked.variant, *fallbacks(traced.settings, prepared.blocked.linear_losses)):
        in_vain = time.perf_counter() - start
        here = prepared if variant is prepared.blocked.variant else \
            prepare(traced, variant, limit=lambda blocked: limit)
        try:
            plan, orders = _whole_or_searched(here, method, limit)
        except InfeasibleBudget as error:
            refused.append(error)
            continue
        warn_of(here)
        if refused:
            plan = replace(plan, stage_seconds={**plan.stage_seconds, "other variants": in_vain})
        return Planned(plan, here, orders)
    raise min(refused, key=lambda error: error.minimum_bytes)


def plan_prepared(prepared: Prepared, limit: int, planner: str = DEFAULT) -> Plan:
    """The plan of one variant alone, which `make_plan` asks for each. Raises what `make_plan` raises."""
    return _whole_or_searched(prepared, find_planner(planner, prepared.settings.of_planner), limit)[0]


def smallest_peak_of(prepared: Prepared, above: int) -> int:
    """The smallest budget that the default planner meets on a variant, in bytes; `above` is one that may be
    too small."""
    method = find_planner(DEFAULT, prepared.settings.of_planner)
    least = smallest_budget(method, solve(prepared).problem, above)
    assert least is not None
    return least


def make_curve(traced: Traced, budgets: Sequence[Budget] | None, planner: str) -> list[Plan]:
    """A plan for each budget, as `make_plan` finds them; what is found for one serves the others, too, so
    that more memory is never slower. Without budgets: for ten between the first variant's peak and its
    smallest. Raises what `make_plan` raises."""
    prepared = prepare(traced)
    high = prepared.baseline_peak
    method = find_planner(planner, traced.settings.of_planner)
    solved = solve(prepared) if budgets is None else None
    if solved is not None:
        low = _smallest(solved, method, 0)
        if low is None:
            raise ArgumentError(f"planner is {method.name!r}, which has no schedule for this model at any "
                                "budget: take another one")
        limits = [low + (high - low) * k // (CURVE - 1) for k in range(CURVE - 1, -1, -1)]
    else:
        limits = [limit_of(prepared, budget) for budget in budgets or ()]
    plans: dict[int, Plan] = {}
    rest, here = sorted(set(limits)), prepared
    refused: dict[int, InfeasibleBudget] = {}
    for variant in (prepared.blocked.variant, *fallbacks(traced.settings, prepared.blocked.linear_losses)):
        if variant is not prepared.blocked.variant:
            here, solved = prepare(traced, variant), None
        if solved is None and not _all_fit(here, method, rest):
            solved = solve(here)
        made, errors = _curve(here, solved, method, rest)
        plans |= made
        if made:
            warn_of(here)
        refused |= {limit: min((e for e in (refused.get(limit), error) if e is not None),
                               key=lambda e: e.minimum_bytes) for limit, error in errors.items()}
        rest = sorted(errors)
        if not rest:
            return [plans[limit] for limit in limits]
    raise refused[rest[0]]


def _curve(prepared: Prepared, solved: Solved | None, method: Planner, limits: Sequence[int],
           ) -> tuple[dict[int, Plan], dict[int, InfeasibleBudget]]:
    """Plans for budgets from the smallest to the largest, and errors of those that cannot be met."""
    known: list[Candidate] | None = None
    attempts: dict[int, Attempt] = {}
    errors: dict[int, InfeasibleBudget] = {}
    for limit in limits:
        attempt = attempts[limit] = attempted(prepared, solved, method, limit, known=known)
        if attempt.plan is None:
            assert solved is not None
            try:
                raise _error(solved, method, limit, attempt)
            except InfeasibleBudget as error:
                errors[limit] = error
        if not _fits(prepared, method, limit):
            known = [*(known or ()), *attempt.found]
    plans = {limit: a.plan for limit, a in attempts.items() if a.plan is not None}
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
    return plans, errors


def follow(traced: Traced, plan: Plan) -> Planned:
    """A plan that was made before, on the variant of the graph that it belongs to. Raises `PlanError` where
    it does not belong to this model."""
    others = [v for v in VARIANTS if v.when(traced.settings) != "never"]
    for variant in dict.fromkeys([*_variants_of(traced, [plan]), *others]):
        found = _followed(block(traced, variant), [plan])
        if found is not None:
            return found
    raise PlanError("the plan belongs to another model, or to other input shapes, dtypes, train "
                    "flags or trained outputs (trains=): make a plan for this one")


def follow_any(traced: Traced, plans: Sequence[Plan]) -> Planned | None:
    """The first of some plans that belongs to a captured model; None where none does."""
    for variant in _variants_of(traced, plans):
        try:
            found = _followed(block(traced, variant), plans)
        except PlanError:
            continue
        if found is not None:
            return found
    return None


def _variants_of(traced: Traced, plans: Sequence[Plan]) -> list[Variant]:
    """The variants that plans name; and the settings' first, for plans that name none."""
    return list(dict.fromkeys([*(named(plan.variant) for plan in plans), first(traced.settings)]))


def _followed(blocked: Blocked, plans: Sequence[Plan]) -> Planned | None:
    for plan in plans:
        if plan.fingerprint == blocked.fingerprint:
            prepared = with_operation_costs(blocked, plan.costs)
            _check(plan, prepared)
            return Planned(plan, prepared)
    return None


def _check(plan: Plan, prepared: Prepared) -> None:
    try:
        peak = prepared.peak(plan.schedule, plan.calls)
    except (ScheduleError, IndexError, KeyError) as error:
        raise PlanError(f"the plan's schedule does not run on this model: {error}") from error
    if peak != plan.peak_bytes:
        raise PlanError(f"the plan says that its peak is {plan.peak_bytes:,} bytes, the simulator "
                        f"says {peak:,}: make the plan again")


def _whole_or_searched(prepared: Prepared, method: Planner, limit: int) -> tuple[Plan, Orders]:
    """A plan for one budget alone. Where a composed planner's budget holds the whole step, no integer
    program is solved."""
    solved = None if _fits(prepared, method, limit) else solve(prepared)
    attempt = attempted(prepared, solved, method, limit)
    if attempt.plan is not None:
        return attempt.plan, () if solved is None else _orders(solved)
    assert solved is not None
    raise _error(solved, method, limit, attempt)


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
        status: Literal["infeasible", "timeout"] = "timeout" if outcome.status == "timeout" else "infeasible"
        return Attempt(None, status, outcome.note, found)
    searched = replace(solved, stage_seconds={**solved.stage_seconds,
                                              "search": time.perf_counter() - start})
    return Attempt(plan_of(prepared, searched, method.name, limit, outcome), "ok", outcome.note, found)


def _error(solved: Solved, method: Planner, limit: int, attempt: Attempt) -> Exception:
    """What a user hears where a planner has no schedule."""
    name = method.name
    if isinstance(method, Composed):
        least = _smallest(_wholly(solved, limit), method, limit)
        assert least is not None
        whole = solved.prepared.baseline_peak
        return InfeasibleBudget(
            f"no schedule fits in {limit:,} bytes; the smallest budget that rockmate always meets is "
            f"{least:,} bytes ({least / whole:.0%} of its own peak of {whole:,} bytes)", least)
    if attempt.status == "timeout":
        return PlanningTimeout(f"{name} found no schedule within {limit:,} bytes in the time "
                               f"it had; {attempt.note or 'give it more, or another planner'}")
    known = _smallest(_wholly(solved, limit), method, limit)
    if known is None:
        return ArgumentError(f"planner is {name!r}, which has no schedule for this model at "
                             f"any budget: {attempt.note or 'take another one'}")
    return InfeasibleBudget(
        f"{name} has no schedule within {limit:,} bytes; the smallest budget that it meets "
        f"is {known:,} bytes. {attempt.note}".rstrip(), known)


def _wholly(solved: Solved, limit: int) -> Solved:
    """The same with nothing counted that has no room to be measured."""
    prepared = wholly_measured(solved.prepared, limit)
    return solved if prepared is solved.prepared else solve(prepared)


def _smallest(solved: Solved, method: Planner, above: int) -> int | None:
    """The smallest budget that a planner is known to meet, for as many calls as the settings say."""
    calls = solved.prepared.settings.calls
    if calls == 1:
        return smallest_budget(method, solved.problem, above)
    return min((c.peak for c in smallest_steps(method, solved.problem, calls)), default=None)


def plan_of(prepared: Prepared, solved: Solved | None, name: str, limit: int, outcome: Outcome) -> Plan:
    """The plan of an outcome that has a schedule, with torch's own kernels where there is room for them.
    `solved`: None where no options were solved for it."""
    assert outcome.schedule is not None
    blocked, parts = prepared.blocked, prepared.partition
    whole = prepared.baseline
    schedule, calls = prepared.with_kernels(outcome.schedule), prepared.settings.calls
    if prepared.peak(schedule, calls) > limit:
        schedule = outcome.schedule             # they leave the peak of one call alone as it is
    result = prepared.simulate(schedule)
    # Of schedules whose computations all go part by part, as planners see them.
    bound = None if outcome.bound is None else max(0.0, outcome.bound - seconds_to_save(prepared.graph))
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
        stage_seconds=dict((solved or prepared).stage_seconds), nodes=dict(blocked.nodes),
        origin=blocked.traced.origin)


def _note(prepared: Prepared, note: str) -> str:
    blocked = prepared.blocked
    names = ", ".join(blocked.linear_losses)
    variant = blocked.variant.note.format(names=names) if names else ""
    return "; ".join(part for part in (note, variant, note_of(prepared)) if part)


def warn_of(prepared: Prepared) -> None:
    """Say which variant was taken, where the settings' first did not do."""
    blocked = prepared.blocked
    if blocked.variant.warning and blocked.variant is not first(blocked.traced.settings):
        warn(blocked.variant.warning.format(names=", ".join(blocked.linear_losses)))
