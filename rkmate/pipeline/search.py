"""The fastest plan of all variants of a model within a budget, or a curve of them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.device import Device
from rkmate.errors import ArgumentError
from rkmate.ir.cd import HOISTED, Cost, Kernel
from rkmate.measure.costs import text_of_beginning
from rkmate.measure.remembered import CostMemory, Numbers
from rkmate.measure.runs import as_in_a_step, median, touched_bytes
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.attempts import (
    Attempt,
    Found,
    LargerTiles,
    Planned,
    attempted,
    fastest_plan,
    fits,
    in_larger_tiles,
    plan_of,
    warn_of,
    with_more_options,
)
from rkmate.pipeline.device_room import device_room, largest_that_fits
from rkmate.pipeline.following import (
    place_of,
    planned_as_named,
    recall,
    recall_named,
    remember,
    remember_named,
)
from rkmate.pipeline.prepare import (
    Blocked,
    Prepared,
    Traced,
    block,
    compile_all,
    cost_memory,
    measured_costs,
    prepare,
)
from rkmate.pipeline.refuse import (
    Refused,
    error_of_all,
    limit_of,
    refuse_unmeasured,
    refused_as_it_is,
    refused_at_once,
    room_within,
    seconds_of_any,
    smallest_of,
    tell,
)
from rkmate.pipeline.solve import Solved, solve
from rkmate.pipeline.variants import (
    CHANNELS_LAST,
    FASTER_BY,
    TILES,
    Variant,
    is_faster,
    may_be_faster,
    others,
    seconds_of_faster,
)
from rkmate.planners.protocol import Candidate, Composed, Planner, best
from rkmate.planners.registry import planner as find_planner
from rkmate.show.plan import Plan
from rkmate.support.defaults import DEFAULT_PLANNER

# -- Plans and curves ------------------------------------------------------------------------------
#
# The one way to plan: a captured model and a budget in, a plan out.
#
# What every public function does, `rkmate.runtime` included: trace, block, costs, and for a budget below the
# model's own peak options, chain and a planner's search; then the same of each other variant of the graph
# that may be faster.


CURVE = 10
"""Budgets of a curve, unless the caller names them."""


def make_plan(traced: Traced, budget: Budget, planner: str) -> Planned:
    """Return the fastest plan that a planner finds within a budget, over the variants of the graph.

    If the whole step of the first variant fits, it is taken, unless the user asked for others. A budget that
    is a fraction refers to the peak of the first variant (``Settings.fraction_of`` chooses it for a model
    that checkpoints).

    On a device with a caching allocator, fragments count, too: a budget that is a share of the device has to
    hold them. With other budgets, many fragments lead to a warning.

    Raises:
        InfeasibleBudget: the planner has a schedule within a larger budget only, in every variant; it says
            the smallest of those budgets.
        PlanningTimeout: its time was over before it found one.
        ArgumentError: it has no schedule for this model at any budget.
    """
    traced = traced.timed()
    blocked = block(traced)
    blocks = {blocked.variant: blocked}
    refuse_unmeasured(blocks, budget, find_planner(planner, traced.settings.of_planner))
    seconds = measure_in_turns(blocks, room_within(budget))
    prepared = prepare(traced, blocked=blocked, limit=room_within(budget)).after(seconds)
    tell(prepared, budget)
    limit = limit_of(prepared, budget)
    room = device_room(prepared, budget.device)
    if room is None or budget.device is None:
        planned = planned_within(prepared, limit, planner, blocks)
        if room is not None:
            room.tell(planned)
        return planned
    return largest_that_fits(limit, lambda least: planned_within(prepared, least, planner), room)


def plan_prepared(prepared: Prepared, limit: int, planner: str = DEFAULT_PLANNER) -> Plan:
    """Return the fastest plan within `limit` bytes, given the prepared first variant. Raises as
    `make_plan`."""
    return planned_within(prepared, limit, planner).plan


def planned_within(prepared: Prepared, limit: int, planner: str = DEFAULT_PLANNER,
                   blocks: Mapping[Variant, Blocked] = MappingProxyType({})) -> Planned:
    """Compare the variants' plans; an earlier process may have done so. `blocks`: variants that were cut into
    blocks before."""
    traced = prepared.blocked.traced
    method = find_planner(planner, traced.settings.of_planner)
    place = None if fits(prepared, method, limit) else place_of(prepared, limit, method.name)
    known = None if place is None else recall(place, prepared, limit, method.name, blocks)
    if known is not None:
        warn_of(known[0].prepared, known[1])
        return known[0]
    variants = (prepared.blocked.variant, *others(traced.settings, prepared.blocked.concerned))
    compared = _Comparison(prepared, limit, method, blocks)
    for number, variant in enumerate(variants):
        traced.progress.part = f" (graph {number + 1} of at most {len(variants)})" if number else ""
        compared.look_at(variant)
    traced.progress.part = ""
    planned, reason = compared.result()
    warn_of(planned.prepared, reason)
    if place is not None:
        remember(place, planned, reason)
    return planned


class _Comparison:
    """The plans of a model's variants, compared one after the other; the first variant comes first."""

    def __init__(self, prepared: Prepared, limit: int, method: Planner,
                 blocks: Mapping[Variant, Blocked]) -> None:
        """`prepared`: the first variant; `blocks`: variants that were cut into blocks before."""
        self.prepared, self.limit, self.method, self.blocks = prepared, limit, method, blocks
        self.traced, self.first = prepared.blocked.traced, prepared.blocked.variant
        self.taken: Found | None = None
        """The plan to take."""
        self.before: Found | None = None
        """The plan of the first variant."""
        self.quick: list[Found] = []
        """Plans that a longer search may make the fastest."""
        self.refused: list[Refused] = []
        self.late: list[str] = []
        """Variants for which no time was left."""
        self.spent = {self.first: sum(prepared.stage_seconds.values()) - self.traced.seconds}
        """Each variant's seconds."""

    def look_at(self, variant: Variant) -> None:
        """Plan a variant, unless it cannot win, and take its plan where it is the fastest."""
        start = time.perf_counter()
        if variant is not self.first and self.taken is not None:
            if not _may_win(self.taken.plan, self.prepared, self.limit, variant):
                return
            if self.traced.is_late:
                self.late.append(variant.name)
                return
        here = self._prepared(variant)
        if here is not None and (
                self.taken is None or _is_worth_solving(self.taken.plan, here, self.method, self.limit)):
            self._plan(here)
        self.spent[variant] = self.spent.get(variant, 0.0) + time.perf_counter() - start

    def _prepared(self, variant: Variant) -> Prepared | None:
        """Return a variant with its costs; None where nothing in it is what it is for, or where its bounds
        refuse the budget while no other plan is known."""
        if variant is self.first:
            return self.prepared
        cut = self.blocks.get(variant) or block(self.traced, variant)
        if TILES in variant.rows and not all(cut.concerned[row.name] for row in variant.rows):
            return None                         # nothing runs in tiles, or without passes for norms
        lean = refused_as_it_is(cut, self.method, self.limit) if self.taken is None else None
        if lean is not None:
            self.refused.append(Refused(lean, self.limit, measured=False))
            return None
        return prepare(self.traced, blocked=cut, limit=lambda blocked: self.limit)

    def _plan(self, here: Prepared) -> None:
        variant, taken = here.blocked.variant, self.taken
        below = math.inf if taken is None else _to_win(
            taken.plan, None if self.before is None else self.before.plan, variant)
        found = fastest_plan(here, self.method, self.limit, below)
        if isinstance(found, Refused):
            self.refused.append(found)
            return
        self.quick.append(found)
        if variant is self.first:
            self.before = found
        if taken is None or found.plan.step_seconds < below:
            self.taken = taken = found
        # Those that no longer search can make the fastest need not stay in memory.
        most = taken.plan.step_seconds / (1 - FASTER_BY)
        self.quick = [each for each in self.quick if each.may_take(most)]

    def result(self) -> tuple[Planned, tuple[str, str]]:
        """Return the fastest plan, and why its variant was taken (`_reason`), after longer searches where
        they may change which one that is. Raises the error of the refusals where there is none."""
        taken = self.taken or Found(_as_named(self.prepared, self.limit, self.method, self.refused))
        taken, before = _searched_longer(self.quick, taken, self.before, self.method, self.limit, self.spent)
        of_first, variant = None if before is None else before.plan, taken.planned.prepared.blocked.variant
        plan = _against(taken.plan, of_first, self.prepared)
        if len(self.spent) > 1:
            rest = sum(seconds for other, seconds in self.spent.items() if other is not variant)
            plan = replace(plan, stage_seconds={**plan.stage_seconds, "other variants": rest})
        if self.late:
            plan = replace(plan,
                           note=f"{plan.note}; planning_seconds left no time for {', '.join(self.late)}")
        return replace(taken.planned, plan=plan), _reason(taken.plan, of_first)


def _as_named(prepared: Prepared, limit: int, method: Planner, refused: Sequence[Refused]) -> Planned:
    """Return the schedule that these refusals name, or that an earlier one has named, where it fits although
    a search has found none: searches end by clocks, and count in steps. Otherwise, raise the error of the
    refusals, and leave the schedule that it names on disk. `prepared`: the first variant; `refused`: its
    refusal, then the other variants'."""
    place = place_of(prepared, None, method.name)
    before = None if place is None else recall_named(place, refused)
    if before is not None and before.least is not None:
        if before.least.peak <= limit:
            return planned_as_named(before, method.name)
        refused = [*refused, before]
    error, least = error_of_all(refused, method)
    if least.least is not None and least.least.peak <= limit:
        return planned_as_named(least, method.name)
    if place is not None and least is not before:
        remember_named(place, least)
    raise error


def _searched_longer(quick: Sequence[Found], taken: Found, before: Found | None, method: Planner,
                     limit: int, spent: dict[Variant, float]) -> tuple[Found, Found | None]:
    """Search again, with all options of blocks, where that may change which plan is taken, or make it clearly
    faster (`Found.may_take`). Returns the plan to take and that of the first variant. `quick`: the variants'
    plans that this may do; `spent`: each variant's seconds, counted on."""
    traced = taken.planned.prepared.blocked.traced
    for found in sorted(quick, key=lambda f: f.plan.step_seconds):
        variant = found.planned.prepared.blocked.variant
        if traced.is_late or not found.may_take(_to_be_taken(found, taken, before)):
            continue
        start = time.perf_counter()
        longer = in_larger_tiles(with_more_options(found, method, limit), method, limit,
                                 _to_be_taken(found, taken, before))
        spent[variant] += time.perf_counter() - start
        before = longer if found is before else before
        if found is taken:
            taken = longer
        elif longer is before:
            taken = taken if is_faster(taken.plan.step_seconds, before.plan.step_seconds,
                                       taken.planned.prepared.blocked.variant) else before
        elif _wins(longer.plan, taken.plan, None if before is None else before.plan, variant):
            taken = longer
    return taken, before


def _to_be_taken(found: Found, taken: Found, before: Found | None) -> float:
    """Return the seconds of a step below which a variant's plan is taken, or a better one than is taken now.
    The first variant is taken unless another one is faster by a margin. `before`: its plan."""
    if found is taken:
        return taken.plan.step_seconds
    if found is before:
        return taken.plan.step_seconds / (1 - FASTER_BY)
    return _to_win(taken.plan, None if before is None else before.plan,
                   found.planned.prepared.blocked.variant)


def _may_win(plan: Plan, prepared: Prepared, limit: int, variant: Variant) -> bool:
    """Return whether another variant is worth preparing, compared with a plan of the first variant or of
    another one. The times of other kernels are not known before."""
    if variant.takes_longer or (variant.saves_memory and prepared.baseline_peak <= limit):
        return False
    other_layout = (CHANNELS_LAST in variant.rows) != (CHANNELS_LAST in prepared.blocked.variant.rows)
    return other_layout or may_be_faster(plan.step_seconds, prepared.searched, variant)


def _is_worth_solving(plan: Plan, prepared: Prepared, method: Planner, limit: int) -> bool:
    """Return whether a variant that is prepared can be faster than a plan, by what no schedule of it does
    better."""
    variant, seconds = prepared.blocked.variant, plan.step_seconds
    return may_be_faster(seconds, prepared.searched, variant) and (
        fits(prepared, method, limit) or is_faster(seconds_of_any(prepared, limit), seconds, variant))


def _wins(plan: Plan, taken: Plan, before: Plan | None, variant: Variant) -> bool:
    """Return whether a variant's plan replaces the fastest plan so far. `before`: the first variant's
    plan."""
    return plan.step_seconds < _to_win(taken, before, variant)


def _to_win(taken: Plan, before: Plan | None, variant: Variant) -> float:
    """Return the seconds of a step below which a variant's plan replaces the fastest plan so far."""
    seconds = taken.step_seconds
    return seconds if before is None else min(seconds, seconds_of_faster(before.step_seconds, variant))


def _against(plan: Plan, before: Plan | None, prepared: Prepared) -> Plan:
    """Return a plan compared with the first variant's plan and with the first variant's step without
    rematerialization."""
    plan = replace(plan, baseline_peak_bytes=prepared.own_peak,
                   baseline_seconds=prepared.baseline.seconds)
    if before is None or plan.variant == before.variant:
        return plan
    known = [p.minimum_bytes for p in (plan, before) if p.minimum_bytes is not None]
    faster = f"{_share(plan, before)} faster than the fastest schedule of the original's operations"
    return replace(plan, note=f"{plan.note}; {faster}", first_seconds=before.first_seconds,
                   minimum_bytes=min(known, default=None))


def _share(plan: Plan, before: Plan) -> str:
    return f"{1 - plan.step_seconds / before.step_seconds:.1%}"


def _reason(plan: Plan, before: Plan | None) -> tuple[str, str]:
    """Return why a variant was taken, and what the settings that forbid it would do instead."""
    if before is None:
        return "nothing fits in this budget with the original's operations", "refuses such budgets"
    return (f"this is {_share(plan, before)} faster than the fastest schedule of the original's operations "
            "within this budget", "keeps its bits")


def smallest_peak_of(prepared: Prepared, above: int) -> int:
    """Return the smallest budget that the default planner is known to meet, in bytes, on the first variant,
    or where that needs more than `above`, on any."""
    method = find_planner(DEFAULT_PLANNER, prepared.settings.of_planner)
    blocked, least = prepared.blocked, prepared.baseline_peak
    for variant in (blocked.variant, *others(prepared.settings, blocked.concerned)):
        here = prepared if variant is blocked.variant else prepare(blocked.traced, variant)
        at_once = refused_at_once(here, method, above)
        found = smallest_of(solve(here), method, above) if at_once is None else at_once.least
        assert found is not None
        least = min(least, found.peak)
        if least <= above:
            break
    return least


def make_curve(traced: Traced, budgets: Sequence[Budget] | None, planner: str) -> list[Plan]:
    """Return a plan for each budget, as `make_plan` finds them. Schedules found for one budget serve the
    others, too, so that more memory is never slower (except for the margin by which a variant must be
    faster). Without budgets: ten plans between the first variant's peak and the smallest budget of any
    variant without tiles of images. Raises as `make_plan`."""
    blocked = block(traced)
    blocks = {blocked.variant: blocked}
    seconds = measure_in_turns(blocks)
    prepared = prepare(traced, blocked=blocked).after(seconds)
    method = find_planner(planner, traced.settings.of_planner)
    variants = (blocked.variant, *others(traced.settings, blocked.concerned))
    made = {blocked.variant: prepared}
    known: dict[Variant, Solved] = {}

    def prepared_of(variant: Variant) -> Prepared:
        if variant not in made:
            made[variant] = prepare(traced, variant, blocked=blocks.get(variant))
        return made[variant]

    def solved_of(variant: Variant) -> Solved:
        if variant not in known:
            known[variant] = solve(prepared_of(variant))
        return known[variant]

    if budgets is None:
        planned = [v for v in variants if TILES not in v.rows or v is blocked.variant]
        lows = [c.peak for v in planned if (c := smallest_of(solved_of(v), method, 0)) is not None]
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
        plans[limit] = _as_named(prepared, limit, method, refused[limit]).plan
    for variant in variants:
        for limit in sorted(n for n, plan in plans.items() if plan.variant == variant.name)[:1]:
            warn_of(prepared_of(variant), _reason(plans[limit], before.get(limit)))
    return [_against(plans[limit], before.get(limit), prepared) for limit in limits]


def _curve(prepared: Prepared, solved: Solved | None, method: Planner, limits: Sequence[int],
           ) -> tuple[dict[int, Plan], dict[int, Refused]]:
    """Return plans for budgets from the smallest to the largest, and those that are refused."""
    known: list[Candidate] | None = None
    attempts: dict[int, Attempt] = {}
    refused: dict[int, Refused] = {}
    for limit in limits:
        attempt = attempts[limit] = attempted(prepared, solved, method, limit, known=known)
        if attempt.plan is None:
            refused[limit] = Refused(prepared, limit, solved, attempt.status == "timeout", attempt.note)
        if not fits(prepared, method, limit):
            known = [*(known or ()), *attempt.found]
    tiles = LargerTiles(prepared, method)
    plans = {limit: tiles.of(a.plan, limit) for limit, a in attempts.items() if a.plan is not None}
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


def _all_fit(prepared: Prepared, method: Planner, limits: Sequence[int]) -> bool:
    return all(fits(prepared, method, limit) for limit in limits)


# -- Variants that are measured in turns -----------------------------------------------------------
#
# Variants whose kernels differ, measured in turns.
#
# Compiling and planning one variant before the next is measured would take a minute, in which a machine can
# change its speed by more than a layout gains. So both are measured before either is planned, and then both
# once more. The median of each operation's times counts, as usual.


LEAST_ROUNDS = 2


def measure_in_turns(blocks: dict[Variant, Blocked], limit: Callable[[Blocked], int] | None = None) -> float:
    """Measure the first variant and one that is compared with it because its kernels may be faster, and
    remember what they cost; nothing where there is none, or where costs are known, or counted. Seconds that
    it took. `blocks`: the first variant, and others that were looked at; the one that is measured is added.
    `limit`: the bytes that measuring may take."""
    start = time.perf_counter()
    one = next(iter(blocks.values()))
    settings = one.traced.settings
    variant = next((v for v in others(settings, one.concerned)
                    if (CHANNELS_LAST in v.rows) != (CHANNELS_LAST in one.variant.rows)), None)
    if variant is None or settings.costs == "analytic":
        return 0.0
    if variant not in blocks:
        blocks[variant] = block(one.traced, variant)
    both = (one, blocks[variant])
    if _are_known(both, cost_memory()):
        return time.perf_counter() - start
    for each in both:
        compile_all(each.partition.program.operation, each.traced.progress)
    rounds = max(LEAST_ROUNDS, settings.measure.passes)
    part = replace(settings.measure, passes=1, share=settings.measure.share / rounds,
                   least_seconds=settings.measure.least_seconds / rounds)
    found = [CostMemory(None) for _ in range(rounds)]
    for own in found:
        for each in both:
            measured_costs(each, own, part, limit)
    for each in both:
        _remember(each, part, found, cost_memory())
    return time.perf_counter() - start


def _are_known(both: Sequence[Blocked], memory: CostMemory) -> bool:
    return all(None not in _known(each, each.traced.settings.measure, memory) for each in both)


def _remember(blocked: Blocked, part: MeasureSettings, found: Sequence[CostMemory],
              memory: CostMemory) -> None:
    """Store the median of each operation. If an operation did not fit in a round, its block stays to be
    measured."""
    where = _measured_on(blocked, blocked.traced.settings.measure)
    rounds = [_known(blocked, part, own) for own in found]
    for (text, _), runs in zip(_texts(blocked), zip(*rounds, strict=True), strict=True):
        whole = [costs for costs in runs if costs is not None]
        if len(whole) == len(runs):
            memory.put(text, *where, tuple(map(_median, zip(*whole, strict=True))))


def _known(blocked: Blocked, settings: MeasureSettings, memory: CostMemory) -> list[Numbers | None]:
    """Return the entry of a memory for each text."""
    where = _measured_on(blocked, settings)
    return [memory.get(text, *where, count) for text, count in _texts(blocked)]


def _texts(blocked: Blocked) -> list[tuple[str, int]]:
    """Return each text under which costs are remembered, once, with its number of operations."""
    hoisted = blocked.partition.block_of.count(HOISTED)
    blocks = {text: len(b.c) for text, b in zip(blocked.texts, blocked.partition.blocks, strict=True)}
    return [(text_of_beginning(hoisted, blocked.texts), hoisted), *blocks.items()]


def _measured_on(blocked: Blocked, settings: MeasureSettings) -> tuple[Device, MeasureSettings]:
    """Return the device and the settings of a measurement."""
    device = devices.of(blocked.traced.device)
    return device, as_in_a_step(settings, device, touched_bytes(blocked.traced.capture.graph))


def _median(runs: Sequence[Cost]) -> Cost:
    """Return, for one operation measured in several rounds, the median of its seconds and the largest
    memory."""
    kernels = [(median(k.time for k in same), max(k.overhead for k in same)) for same in zip(
        *((Kernel(run.time, run.overhead), *run.alternatives) for run in runs), strict=True)]
    return Cost(*kernels[0], tuple(Kernel(*k) for k in kernels[1:]))
