"""Try one variant within one budget: its plan, and its plan with larger tiles if these are faster."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import fx

from rkmate.errors import WishError
from rkmate.graph.blocks.lower import storage_bytes
from rkmate.graph.passes.fusion import Cluster
from rkmate.ir.cd import CNode, Cost
from rkmate.ir.kernels import by_own_kernels, fastest, seconds_to_gain, seconds_to_save
from rkmate.ir.plan import Run
from rkmate.ir.schedule import unmet_wishes
from rkmate.offload import target as offload
from rkmate.pipeline.prepare import Blocked, Prepared, compiled_by, with_operation_costs
from rkmate.pipeline.refuse import (
    Refused,
    bytes_of_any,
    lean_schedule,
    note_of,
    refused_at_once,
    seconds_of_any,
)
from rkmate.pipeline.solve import Solved, runs_of, runs_of_operations, solve_lean, solve_more, summarise
from rkmate.pipeline.variants import UNCOMPILED, first
from rkmate.planners.default import Auto, Default
from rkmate.planners.offload_search import whole_at_once
from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner, ask, found_in
from rkmate.planners.several_calls import ask_for_calls
from rkmate.show.amounts import size
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import gc_pause
from rkmate.support.warn import warn
from rkmate.torch_seam.nodes import VALUE

logger = logging.getLogger("rkmate")

# -- Attempts --------------------------------------------------------------------------------------
#
# What a planner makes of one budget, on one variant of the graph.


Orders = tuple[tuple[tuple[int, ...], ...], ...]
"""For each class of blocks, the backward orders of its options."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the variant of the graph that it runs over, for code to be generated."""

    plan: Plan
    prepared: Prepared
    orders: Orders = ()
    """Options that were solved for the plan; empty if none were."""
    said: str = ""
    """The planner's words about its schedule: the first part of the plan's note."""


@dataclass(frozen=True)
class Attempt:
    """Result of one planner for one budget."""

    plan: Plan | None
    """The plan; None unless the status is ok."""
    status: Literal["ok", "infeasible", "timeout"]
    note: str
    found: tuple[Candidate, ...] = ()
    """Schedules for other budgets to know."""


def fits(prepared: Prepared, method: Planner, limit: int) -> bool:
    """Return whether a planner runs the whole step within a budget, whatever the options of blocks are."""
    return isinstance(method, Composed) and prepared.baseline_peak <= limit and not prepared.graph.forgotten


@gc_pause()
def attempted(prepared: Prepared, solved: Solved | None, method: Planner, limit: int, *,
              time_limit: float | None = None, known: Sequence[Candidate] | None = None) -> Attempt:
    """Return what a planner finds within `limit` bytes. Finding nothing is a result, too.

    `solved`: may be None where the planner is a composed one and the whole step fits. `time_limit`:
    seconds of planning, what the settings leave unless given. `known`: schedules found for other budgets;
    None at the first one.
    """
    if fits(prepared, method, limit):
        each_once = sum(c.time for c in prepared.graph.c)
        outcome = Outcome(prepared.whole, "ok", prepared.baseline.seconds, bound=each_once,
                          note="nothing needs to be recomputed")
        return Attempt(plan_of(prepared, None, method.name, limit, outcome), "ok", outcome.note)
    assert solved is not None
    start = time.perf_counter()
    seconds = prepared.blocked.traced.seconds_left if time_limit is None else time_limit
    calls = prepared.settings.calls
    with prepared.blocked.traced.progress.stage("searching", None, at_most=seconds):
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
    """Return the plan of an outcome that has a schedule, with the fastest kernels that there is room for.
    `solved`: None where no options were solved for it."""
    assert outcome.schedule is not None
    blocked, parts = prepared.blocked, prepared.partition
    whole = prepared.baseline
    calls = prepared.settings.calls
    if unmet := unmet_wishes(prepared.graph, outcome.schedule):
        words = " and ".join(blocked.wishes.words)
        raise WishError(f"planner is {name!r}, whose schedule does not follow {words} "
                        f"({', '.join(unmet[:3])}): take the default planner")
    schedule = prepared.with_kernels(outcome.schedule, limit if calls == 1 else 0)
    if prepared.peak(schedule, calls) > limit:
        schedule = outcome.schedule             # they leave the peak of one call alone as it is
    schedule = prepared.overlapped(schedule, limit)
    result = prepared.simulate(schedule)
    # Of schedules whose computations all run by their own kernels, as planners see them.
    bound = None if outcome.bound is None else max(0.0, outcome.bound - seconds_to_save(prepared.graph))
    if bound is not None and math.isclose(bound, result.seconds):
        bound = min(bound, result.seconds)      # the same numbers, added up in another order
    if bound is not None and schedule.starts:   # a bound of schedules that wait for each collective at once
        graph = prepared.graph if solved is None else solved.problem.graph
        bound = max(0.0, bound - sum(c.time for c in graph.c if c.exchanges))
    runs: Sequence[Run]
    if solved is None or not outcome.ops:
        runs = tuple(runs_of(outcome.schedule, prepared.graph, parts.block_of))
    else:
        runs = tuple(runs_of_operations(outcome.ops, solved.options))
    return Plan(
        planner=name, budget_bytes=limit, peak_bytes=prepared.peak(schedule, calls),
        baseline_peak_bytes=prepared.own_peak,
        step_seconds=result.seconds, baseline_seconds=whole.seconds, bound_seconds=bound,
        minimum_bytes=outcome.smallest, blocks=prepared.infos if solved is None else solved.infos,
        runs=runs, schedule=schedule, fingerprint=blocked.fingerprint,
        graph=solved.summary if solved else summarise(prepared),
        note=whole_note(prepared, outcome.note), variant=blocked.variant.name, calls=calls,
        deferred=_deferred(blocked),
        gradients=prepared.settings.gradients, compiled=compiled_by(prepared.settings),
        fused=_fused_in(parts.program.operation),
        stage_seconds=dict((solved or prepared).stage_seconds), first_seconds=outcome.first_seconds,
        nodes=dict(blocked.nodes), origin=blocked.traced.origin)


def whole_note(prepared: Prepared, note: str) -> str:
    """Return a plan's note: what the planner says, and what there is to say of its graph."""
    blocked = prepared.blocked
    variant = blocked.variant.notes(blocked.concerned)
    beside = f"budget and peak are without {size(prepared.beside)} next to the step (values computed " \
        "before it, copies to undo a forward, what the caller holds), and the peak without " \
        "rematerialization is with it" if prepared.beside else ""
    parts = (note, variant, beside, _note_of_deferred(blocked), note_of(prepared),
             offload.note_of(prepared.graph.link, prepared.settings.costs))
    return "; ".join(part for part in parts if part)


def _deferred(blocked: Blocked) -> tuple[str, ...]:
    """Return the names of the outputs that a graph leaves out, and that are computed when they are read."""
    result = blocked.traced.capture.result
    return tuple(result.name_of(d.output) for d in blocked.partition.program.joint.deferred)


def bytes_of_deferred(blocked: Blocked) -> int:
    """Return the bytes that these outputs take once they are read."""
    return sum(storage_bytes(d.result.meta[VALUE]) for d in blocked.partition.program.joint.deferred)


def _note_of_deferred(blocked: Blocked) -> str:
    deferred = blocked.partition.program.joint.deferred
    if not deferred:
        return ""
    several = len(deferred) > 1
    return (f"the output{'s' if several else ''} {' and '.join(_deferred(blocked))} "
            f"{'are' if several else 'is'} computed when somebody reads {'them' if several else 'it'}, which "
            f"takes {size(bytes_of_deferred(blocked))} on top of the plan")


def warn_of(prepared: Prepared, reason: tuple[str, str]) -> None:
    """Say which variant was taken, where it is not the settings' first. `reason`: why, and what the settings
    that forbid it lead to."""
    blocked = prepared.blocked
    always = first(blocked.traced.settings).rows
    if any(row.trades and not row.asked_for and row not in always for row in blocked.variant.rows):
        warn(blocked.variant.warning(*reason, blocked.concerned))
    if UNCOMPILED in blocked.variant.rows:
        logger.warning("%s is planned without compiled groups: no schedule with them fits in this budget",
                       blocked.traced.name)


# -- Larger tiles ----------------------------------------------------------------------------------
#
# Plans that make room for larger tiles.
#
# Planners see wide computations by their leanest kernels, in many small tiles, and a finished schedule takes
# faster ones where it leaves room (`rkmate.ir.kernels`). Where small tiles take much longer, it may pay to
# compute something else again, and to have that room. So the same search runs with larger tiles as the
# leanest.


WORTH = 0.01
"""The share of a step that another search may gain at least, and that one computation's kernels do."""
LARGER = 1.1
"""Search separately for kernels that take this multiple of the previous kernel's bytes. Every search can
choose kernels of about equal size."""


def with_larger_tiles(plan: Plan, prepared: Prepared, limit: int,
                      leaner: Callable[[tuple[int, ...], int], Prepared],
                      search: Callable[[Prepared, float | None], Planned | None], below: float) -> Plan:
    """Return a plan within `limit` bytes that is faster by its kernels, or the plan as it is.

    `prepared`: the graph of the plan. `leaner`: `leaner_left_out` of it. `search`: over what that returns,
    within some seconds, or the planner's own; None where it finds nothing. All searches together take what
    ``planning_seconds`` leaves; where there is a link and no such limit, about as long as the first one.
    `below`: a step that takes as many seconds is of no use.
    """
    if prepared.settings.calls != 1:
        return plan
    start, graph, until = time.perf_counter(), prepared.graph, prepared.blocked.traced.until
    seconds, spent = prepared.settings.planning_seconds, plan.stage_seconds.get("search", 0.0)
    if not math.isinf(until):
        seconds = until - start + spent
    if seconds is None and graph.link is not None:      # looking for copies may take as long as it is given
        seconds = spent + max(spent, prepared.settings.of_planner.offload_seconds)
    wide = tuple(i for i, c in enumerate(graph.c)
                 if c.time - fastest(c) > WORTH * plan.step_seconds and _levels(c))
    for level in range(max((len(_levels(graph.c[i])) for i in wide), default=0), 0, -1):
        worth = min((1 - WORTH) * plan.step_seconds, below)
        if seconds_to_gain(graph, plan.schedule) < plan.step_seconds - worth:
            break
        left = None if seconds is None else seconds - spent - (time.perf_counter() - start)
        if left is not None and left <= 0:
            break
        larger = leaner(wide, level)
        if _least_bytes(larger, wide) > limit or seconds_of_any(larger, limit) > worth:
            continue
        found = search(larger, left)
        plan = replace(plan, stage_seconds={**plan.stage_seconds,
                                            "larger tiles": time.perf_counter() - start})
        if found is None:
            continue
        schedule = by_own_kernels(found.plan.schedule.waiting_at_once())
        schedule = prepared.overlapped(prepared.with_kernels(schedule, limit), limit)
        result = prepared.simulate(schedule)
        if result.peak <= limit and result.seconds <= worth:
            plan = replace(plan, schedule=schedule, peak_bytes=result.peak, step_seconds=result.seconds,
                           runs=found.plan.runs, blocks=found.plan.blocks,
                           note=whole_note(prepared, found.said))
    return plan


def _least_bytes(prepared: Prepared, wide: Iterable[int]) -> int:
    """Return bytes that some backward computation, or one of these, needs by itself."""
    graph, size = prepared.graph, [d.size for d in prepared.graph.d]
    fixed = set(graph.inputs)
    alone = [node.overhead + sum(size[j] for j in {*node.inputs, *node.outputs} - fixed)
             - max((size[j] for j in node.donors), default=0) for node in map(graph.c.__getitem__, wide)]
    return max(bytes_of_any(prepared), *alone)


def leaner_left_out(prepared: Prepared, wide: tuple[int, ...], level: int) -> Prepared:
    """Return a copy of `prepared` in which each computation in `wide` starts at its kernel number `level`, so
    that its tiles are larger."""
    costs = dict(prepared.costs)
    for i in wide:
        costs[i] = _from(prepared.graph.c[i], level)
    return with_operation_costs(prepared.blocked, [costs[i] for i in range(len(prepared.graph.c))],
                                link=prepared.graph.link)


def _levels(node: CNode) -> list[int]:
    """Return the indices of alternatives at which a computation's tiles become larger, the smallest memory
    first."""
    found, overhead = [], node.overhead
    for n, other in enumerate(node.alternatives):
        if other.overhead > LARGER * overhead:
            found.append(n)
            overhead = other.overhead
    return found


def _from(node: CNode, level: int) -> Cost:
    levels = _levels(node)
    own, *others = node.alternatives[levels[min(level, len(levels)) - 1]:]
    return Cost(own.time, own.overhead, tuple(others))


# -- Searches --------------------------------------------------------------------------------------
#
# The fastest plan of one variant for one budget: the whole step where that fits, else with the options of
# blocks that need no solver, and with all of them only where these may be faster.


NEAR = 1e-2
"""A schedule that takes no more than this part of its time above the bound is taken before the options of
blocks are solved: they could gain no more than that."""


@dataclass(frozen=True)
class Found:
    """A plan of one variant, and how it was found."""

    planned: Planned
    few: Solved | None = None
    """The options of blocks that it was found with, if these are only those that need no solver: another
    search, with more of them, may find a faster plan."""
    tiles: LargerTiles | None = field(default=None, repr=False)
    """Plans in larger tiles, for another search to know."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def may_take(self, seconds: float) -> bool:
        """Return whether another search may find a plan that takes clearly less than so many seconds."""
        bound = self.plan.bound_seconds
        return self.few is not None and (bound is None or bound < (1 - NEAR) * min(
            seconds, self.plan.step_seconds))


def fastest_plan(prepared: Prepared, method: Planner, limit: int, below: float = math.inf) -> Found | Refused:
    """Return a plan of one variant for one budget alone. `below`: the seconds of a step that the variant has
    to beat."""
    found = _whole_or_searched(prepared, method, limit)
    return found if isinstance(found, Refused) else in_larger_tiles(found, method, limit, below)


def in_larger_tiles(found: Found, method: Planner, limit: int, below: float = math.inf) -> Found:
    """Return a plan in larger tiles where that is faster, and faster than a step of `below` seconds;
    otherwise the plan as it is. It has the options of blocks that the given one was found with."""
    planned = found.planned
    tiles = found.tiles or LargerTiles(planned.prepared, method)
    plan = tiles.of(planned.plan, limit, all_options=found.few is None, below=below)
    return replace(found, planned=replace(planned, plan=plan), tiles=tiles)


class LargerTiles:
    """Plans of one variant in larger tiles. What is prepared and solved for one budget serves the others, and
    what is found within a budget is found once."""

    def __init__(self, prepared: Prepared, method: Planner) -> None:
        self.prepared = prepared
        # What else "auto" asks may take all of its time again.
        self.method = method.default if isinstance(method, Auto) else method
        self.leaner_left_out = functools.cache(functools.partial(leaner_left_out, prepared))
        # No function here holds the object itself: it goes, with the caller's tensors, once nobody needs it.
        lean, more, asked = functools.cache(solve_lean), functools.cache(solve_more), self.method
        self.more = more
        self.found = functools.cache(lambda larger, limit, seconds: _whole_or_searched(
            larger, asked, limit, seconds, lean, more))

    def of(self, plan: Plan, limit: int, *, all_options: bool = True, below: float = math.inf) -> Plan:
        """Return a plan within `limit` bytes that is faster by its kernels, and than a step of `below`
        seconds, or the plan as it is.
        `all_options`: whether more options of blocks are solved where those that need no solver lead to a
        plan far from its bound."""
        def search(larger: Prepared, seconds: float | None) -> Planned | None:
            until = None if seconds is None else time.perf_counter() + seconds
            found = self.found(larger, limit, seconds)
            if isinstance(found, Refused):
                return None
            if all_options and found.may_take(plan.step_seconds):
                left = None if until is None else max(0.0, until - time.perf_counter())
                found = with_more_options(found, self.method, limit, left, self.more)
            return found.planned

        if not isinstance(self.method, Composed):
            return plan
        return with_larger_tiles(plan, self.prepared, limit, self.leaner_left_out, search, below)


def _whole_or_searched(prepared: Prepared, method: Planner, limit: int, time_limit: float | None = None,
                       lean: Callable[[Prepared], Solved] | None = None,
                       more: Callable[[Solved], Solved] | None = None) -> Found | Refused:
    """Plan with the smallest-memory kernel of each computation. If a composed planner's budget holds the
    whole step, or is clearly too small, no integer program is solved. The default planner is asked with the
    options of blocks that need no solver, first. `time_limit`: seconds; what the settings leave by default.
    `lean`, `more`: make options."""
    whole = fits(prepared, method, limit)
    at_once = None if whole else refused_at_once(prepared, method, limit)
    if at_once is not None:
        return at_once
    seconds = prepared.blocked.traced.seconds_left if time_limit is None else time_limit
    if whole:
        attempt = attempted(prepared, None, method, limit, time_limit=seconds)
        assert attempt.plan is not None
        return Found(Planned(attempt.plan, prepared, said=attempt.note))
    sent = sent_whole(prepared, method, limit, seconds)
    if sent is not None:
        return Found(Planned(plan_of(prepared, None, method.name, limit, sent), prepared, said=sent.note))
    begin, few = time.perf_counter(), (lean or solve_lean)(prepared)
    # The default planner is asked twice, except for copies: these take a search of their own.
    if isinstance(method, Default) and prepared.settings.calls == 1 and prepared.graph.link is None:
        attempt = attempted(prepared, few, method, limit, time_limit=seconds, known=())
        if attempt.plan is not None:
            return Found(Planned(attempt.plan, prepared, _orders(few), attempt.note), few)
    solved = (more or solve_more)(few)
    left = None if seconds is None else max(0.0, seconds - (time.perf_counter() - begin))
    attempt = attempted(prepared, solved, method, limit, time_limit=left)
    if attempt.plan is None:
        return Refused(prepared, limit, solved, attempt.status == "timeout", attempt.note)
    return Found(Planned(attempt.plan, prepared, _orders(solved), attempt.note))


def with_more_options(found: Found, method: Planner, limit: int, time_limit: float | None = None,
                      more: Callable[[Solved], Solved] | None = None) -> Found:
    """Return what a planner finds with all options of blocks, or what was found before where that is
    faster."""
    assert found.few is not None
    before, prepared = found.plan, found.planned.prepared
    begin, solved = time.perf_counter(), (more or solve_more)(found.few)
    left = None if time_limit is None else max(0.0, time_limit - (time.perf_counter() - begin))
    middle = time.perf_counter()
    attempt = attempted(prepared, solved, method, limit, time_limit=left)
    spent = {**before.stage_seconds, **{stage: solved.stage_seconds[stage] for stage in ("options", "chain")},
             "search": before.stage_seconds["search"] + time.perf_counter() - middle}
    if attempt.plan is None or attempt.plan.step_seconds >= before.step_seconds:
        return Found(replace(found.planned, plan=replace(before, stage_seconds=spent)), tiles=found.tiles)
    plan = replace(attempt.plan, first_seconds=before.first_seconds or before.step_seconds,
                   stage_seconds=spent)
    return Found(Planned(plan, prepared, _orders(solved), attempt.note), tiles=found.tiles)


def _orders(solved: Solved) -> Orders:
    by_class = dict(zip(solved.prepared.blocked.classes, solved.options, strict=True))
    return tuple(tuple(option.backward for option in by_class[k]) for k in range(len(by_class)))


def sent_whole(prepared: Prepared, method: Planner, limit: int,
               time_limit: float | None) -> Outcome | None:
    """Return the outcome of a planner that sends data away, if everything that does not fit can be copied
    away without a wait. None otherwise: options have to be solved. `time_limit`: seconds, out of those
    allowed for the search for copies."""
    if prepared.graph.link is None or prepared.settings.calls != 1 or not isinstance(method, Composed) \
            or prepared.graph.forgotten:
        return None
    return whole_at_once(prepared.graph, prepared.whole, limit, prepared.settings.of_planner,
                         time_limit=time_limit)


def _fused_in(operations: Iterable[fx.Node]) -> tuple[tuple[str, int], ...]:
    """Return, for each compiled group of the graph, the names of its operations, and how many times it
    occurs."""
    counts = Counter(n.target for n in operations if isinstance(n.target, Cluster))
    return tuple((", ".join(cluster.operations), times) for cluster, times in counts.items())
