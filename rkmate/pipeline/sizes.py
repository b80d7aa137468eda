"""Plans for other sizes of a call, derived from known plans."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.budget import Budget
from rkmate.errors import ScheduleError
from rkmate.graph.blocks.lower import Program
from rkmate.ilp.grid import OptionSet, evaluate_option
from rkmate.ir.cd import CDGraph, Cost, Kernel
from rkmate.ir.kernels import by_own_kernels, seconds_to_gain
from rkmate.ir.schedule import Schedule, from_order
from rkmate.measure.temporaries import bytes_of, bytes_of_parts
from rkmate.pipeline.attempts import WORTH, Orders, Planned, attempted, plan_of, warn_of
from rkmate.pipeline.device_room import device_room, largest_that_fits
from rkmate.pipeline.prepare import Prepared, Traced, block, prepare, with_operation_costs
from rkmate.pipeline.refuse import limit_of, room_within
from rkmate.pipeline.solve import solve_with
from rkmate.pipeline.variants import Variant, first, is_faster, named
from rkmate.planners.chain import ChainSearch
from rkmate.planners.finish import finish
from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner
from rkmate.planners.registry import planner as find_planner
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import capture_lock, gc_pause

# -- Other sizes -----------------------------------------------------------------------------------
#
# Plans for other sizes of what was planned before: costs are scaled, schedules taken over.
#
# The graph of the new size is rewritten and cut as usual. If its computations are those of a known plan, in
# the same order, nothing is measured and no integer program is solved: the simulator judges the known
# schedules, and the chain's dynamic program over the known options, at the new sizes.


UNUSED = 0.03
"""A schedule that leaves less of the budget than this share is taken as it is."""
TRIED = 3
"""Known schedules that are judged, the nearest in size first."""
ROUND = 512
"""Scaled temporary memory is rounded up to a multiple of this number of bytes."""
_REASON = "as for another size of these inputs", "keeps its bits, where there is room for it"
"""Why a variant is taken that the known plan runs over."""
_NOTE = "a schedule of another size of the inputs, judged at this one"
_CHAIN_NOTE = "the chain's dynamic program over the options of another size of the inputs"


@dataclass(frozen=True, eq=False)
class KnownPlan:
    """A plan of another size of the same call."""

    plan: Plan
    measured: bool
    """Whether the costs of the plan were measured, not scaled."""
    orders: Orders
    """Orders of the options of each class of blocks; empty if none were solved."""


@gc_pause()
def plan_at_other_size(traced: Traced, budget: Budget, planner: str,
                       known: Sequence[KnownPlan], *, measured: bool) -> Planned | None:
    """Return a plan within the budget, from the known plans; None if they lead to no plan, so that one has to
    be searched for.

    `traced`: the new size. `measured`: measure its costs instead of scaling known ones. Only the default
    planner has this short cut: other planners always search. Of the variants of the graph, those of the known
    plans are compared. If the whole step of the first one fits, variants that save memory are left out.
    """
    method = find_planner(planner, traced.settings.of_planner)
    if not isinstance(method, Composed) or not known or traced.settings.calls != 1:
        return None
    plain = first(traced.settings)
    taken: Planned | None = None
    variants = sorted({named(k.plan.variant) for k in known}, key=lambda v: (v != plain, v.name))
    if traced.settings.layouts == "auto" and plain not in variants:
        # In another layout a step may take more: a fraction stays one of the original's peak.
        prepared = prepare(traced, limit=room_within(budget))
        budget = Budget(bytes=limit_of(prepared, budget) + prepared.beside)
    whole = False
    for variant in variants:
        if whole and variant.saves_memory:
            continue
        found = _of_variant(traced, variant, budget, method, known, measured=measured)
        if variant == plain:
            if found is None:
                return None
            whole = found.prepared.baseline_peak <= found.plan.budget_bytes
            budget = Budget(bytes=found.plan.budget_bytes + found.prepared.beside)
        if found is not None and (taken is None or is_faster(found.plan.step_seconds,
                                                             taken.plan.step_seconds, variant)):
            taken = found
    if taken is not None:
        warn_of(taken.prepared, _REASON)
    return taken


def _of_variant(traced: Traced, variant: Variant, budget: Budget, method: Planner,
                known: Sequence[KnownPlan], *, measured: bool) -> Planned | None:
    """Plan one variant of the graph at another size; None if the known plans give no plan for it."""
    start = time.perf_counter()
    blocked = block(traced, variant)
    cd = blocked.partition.program.cd
    alike = [k for k in known if k.plan.variant == blocked.variant.name and _alike(k.plan.graph.cd, cd)]
    sources = [k.plan for k in alike if k.measured]
    if not sources:
        return None
    costs = None
    if not measured:
        with capture_lock:              # groups run once, and what the process allocates is read
            costs = bounded_costs(scaled_costs(sources, cd), blocked.partition.program)
    prepared = with_operation_costs(blocked, costs, link=sources[0].graph.cd.link, limit=room_within(budget))
    limit = limit_of(prepared, budget)
    orders = next((k.orders for k in alike if k.orders and _is_cut_alike(k.plan, prepared)), ())
    whole: Planned | None = None
    if prepared.baseline.peak <= limit:
        attempt = attempted(prepared, None, method, limit)
        if attempt.plan is None:
            return None
        whole = Planned(attempt.plan, prepared, orders)
        if seconds_to_gain(prepared.graph, attempt.plan.schedule) < WORTH * attempt.plan.step_seconds:
            return whole
    nearest = sorted(alike, key=lambda k: abs(k.plan.graph.cd.total_bytes - cd.total_bytes))
    schedules: list[Schedule] = []
    for k in nearest:
        schedule = k.plan.schedule.waiting_at_once()
        if len(schedules) < TRIED and schedule not in schedules:
            schedules.append(schedule)
    found = _best(prepared, schedules, limit, _NOTE)
    if found is None and orders and whole is None:
        chained = _chained(prepared, orders, limit)
        found = _best(prepared, [] if chained is None else [chained], limit, _CHAIN_NOTE)
    if found is None or (whole is not None and found.seconds >= whole.plan.step_seconds):
        return whole
    outcome = Outcome(found.schedule, "ok", found.seconds, note=found.note)
    plan = plan_of(prepared, None, method.name, limit, outcome)
    plan = replace(plan, stage_seconds={**plan.stage_seconds, "search": time.perf_counter() - start})
    return Planned(plan, prepared, orders)


def _alike(known: CDGraph, new: CDGraph) -> bool:
    """Return whether both have the same computations on the same storages, in one order."""
    if known.wiring != new.wiring:
        return False
    known.__dict__["wiring"] = new.wiring       # the next comparison finds one object
    return True


def _is_cut_alike(known: Plan, new: Prepared) -> bool:
    """Return whether both have the same blocks, and the same ones are equal: cuts depend on sizes."""
    return [c.block for c in known.graph.computations] == list(new.partition.block_of) and \
        [b.label for b in known.blocks] == [b.label for b in new.infos]


def scaled_costs(known: Sequence[Plan], new: CDGraph) -> list[Cost]:
    """Return the costs of each computation at the sizes of `new`, scaled from plans with similar graphs.

    Time is on the line through the two sizes next to it, by bytes read and written. Temporary memory is
    that of the next larger known size, or grows with what grows most among what is read and written.
    """
    sizes = [d.size for d in new.d]
    rows = [([d.size for d in p.graph.cd.d], p.costs) for p in known]
    ratios = [[_ratio(a, b) for a, b in zip(sizes, before, strict=True)] for before, _ in rows]
    # An operation may read what the caller holds, which grows as something in the graph does.
    whole = [most if (most := max(ratio)) > 1 else 0 for ratio in ratios]
    scaled = functools.cache(_scaled)           # layers are alike
    result: list[Cost] = []
    for i, c in enumerate(new.c):
        touched = (*c.inputs, *c.outputs)
        at_known = tuple([(sum([before[j] for j in touched]),
                           max(max([ratio[j] for j in touched], default=1.0), most), costs[i])
                          for (before, costs), ratio, most in zip(rows, ratios, whole, strict=True)])
        result.append(scaled(at_known, sum([sizes[j] for j in touched])))
    return result


def bounded_costs(costs: Sequence[Cost], program: Program) -> list[Cost]:
    """Return scaled costs with the largest temporary memory of parts and other kernels: another size may have
    more of them, fewer, or others."""
    result: list[Cost] = []
    for node, cost in zip(program.operation, costs, strict=True):
        others = program.alternatives.get(node, ())
        known = cost.alternatives if len(cost.alternatives) == len(others) else ()
        result.append(Cost(cost.time, max(cost.overhead, bytes_of_parts(node)), tuple(
            Kernel(k.time, max(k.overhead, bytes_of(o))) for k, o in zip(known, others, strict=False))))
    return result


def _ratio(now: int, before: int) -> float:
    return now / before if before else 1.0


def _scaled(known: Sequence[tuple[int, float, Cost]], moved: int) -> Cost:
    def one(kernels: Sequence[tuple[int, float, Kernel]]) -> Kernel:
        near = sorted(kernels, key=lambda k: abs(k[0] - moved))
        (x, _, a), others = near[0], [k for k in near if k[0] != near[0][0]]
        seconds = a.time * max(1.0, _ratio(moved, x))
        if others:
            y, _, b = others[0]
            seconds = max(a.time + (b.time - a.time) * (moved - x) / (y - x), min(a.time, b.time) / 4)
        larger = [k for k in kernels if k[1] <= 1]
        # Nothing that is read or written is larger there, and so neither is temporary memory.
        overhead = min(k[2].overhead for k in larger) if larger else \
            min(_up(k[2].overhead, k[1]) for k in kernels)
        return Kernel(seconds, overhead)

    plain = one([(m, r, Kernel(c.time, c.overhead)) for m, r, c in known])
    # Where the sizes have other numbers of them, their parts are not the same.
    count = {len(c.alternatives) for _, _, c in known}
    return Cost(plain.time, plain.overhead, tuple(
        one([(m, r, c.alternatives[k]) for m, r, c in known])
        for k in range(count.pop() if len(count) == 1 else 0)))


def _up(size: int, ratio: float) -> int:
    return -int(-size * ratio // ROUND) * ROUND if ratio > 1 and size else size


def _best(prepared: Prepared, schedules: Sequence[Schedule], limit: int, note: str) -> Candidate | None:
    """Return the fastest within the limit, with what is left of it spent."""
    graph = prepared.graph
    found: list[Candidate] = []
    for other in schedules:
        judged = [from_order(graph, other.order, other.loss_at)]
        if other.copied and graph.link is not None:
            judged.append(by_own_kernels(other))        # at another size there may be others
        for schedule in judged:
            try:
                result = prepared.simulate(schedule)
            except ScheduleError:       # it frees what is small enough to stay at this size
                continue
            most = graph.link.most_bytes if graph.link is not None else None
            if result.peak <= limit and (most is None or result.away <= most):
                found.append(Candidate(schedule, result.peak, _seconds(prepared, schedule, limit), note))
    if not found:
        return None
    best = min(found, key=lambda c: (c.seconds, c.peak))
    if best.peak > limit * (1 - UNUSED) or best.schedule.copied:
        return best
    schedule = finish(graph, best.schedule, limit)
    seconds = _seconds(prepared, schedule, limit)
    if seconds > best.seconds:          # the room was for larger tiles
        return best
    return replace(best, schedule=schedule, peak=prepared.simulate(schedule).peak, seconds=seconds)


def _seconds(prepared: Prepared, schedule: Schedule, limit: int) -> float:
    """Return the seconds of a schedule with the kernels that fit into the budget."""
    chosen = prepared.with_kernels(schedule, limit)
    # Kernels change no other time: only what waits for copies needs the simulator once more.
    return prepared.simulate(chosen).seconds if chosen.copied else chosen.seconds(prepared.graph)


def _chained(prepared: Prepared, orders: Orders, limit: int) -> Schedule | None:
    """Return the schedule that the chain's dynamic program makes from the known options at these sizes."""
    graphs = prepared.class_graphs
    if len(graphs) != len(orders):
        return None
    sets = []
    for graph, known in zip(graphs, orders, strict=True):
        if any(not 0 <= i < len(graph.c) for backward in known for i in backward):
            return None
        options = sorted((evaluate_option(graph, backward) for backward in known),
                         key=lambda o: o.forward_seconds + o.backward_seconds)
        sets.append(OptionSet(tuple(options), 0, 0, 0.0))
    search = ChainSearch(prepared.settings.of_planner, tries=5, count=1, quick=True)
    return search.plan(solve_with(prepared, sets), limit).schedule


# -- Sizes within what a device reserves -----------------------------------------------------------
#
# Other sizes under a budget that is a share of the device: plans with the fragments of its allocator.


class _Unknown(Exception):
    """The known plans give no plan within a budget."""


def plan_that_fits(traced: Traced, budget: Budget, planner: str, known: Sequence[KnownPlan], *,
                   measured: bool) -> Planned | None:
    """Return `plan_at_other_size`, within the device's free memory if the budget is a share of it. None if a
    plan has to be searched for."""
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

