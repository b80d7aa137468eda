"""Plans that make room for larger tiles.

Planners see wide computations by their leanest kernels, in many small tiles, and a finished schedule takes
faster ones where it leaves room (`rkmate.ir.kernels`). Where small tiles take much longer, it may pay to
compute something else again, and to have that room. So the same search runs with larger tiles as the leanest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from rkmate.ir.cd import CNode, Cost
from rkmate.ir.kernels import by_own_kernels, fastest, seconds_to_gain
from rkmate.pipeline.attempts import Planned, whole_note
from rkmate.pipeline.bounds import bytes_of_any, seconds_of_any
from rkmate.pipeline.prepare import Prepared, with_operation_costs
from rkmate.show.plan import Plan

WORTH = 0.01
"""The share of a step that another search may gain at least, and that one computation's kernels do."""
LARGER = 1.1
"""A kernel that takes so many times the bytes of the one before is worth a search of its own. What takes
about as much is the same tiles by another library, and every search can choose from those."""


def with_larger_tiles(plan: Plan, prepared: Prepared, limit: int,
                      leaner: Callable[[tuple[int, ...], int], Prepared],
                      search: Callable[[Prepared, float | None], Planned | None]) -> Plan:
    """A plan within `limit` bytes that is faster by its kernels, or the plan as it is.

    `prepared`: the graph of the plan. `leaner`: `leaner_left_out` of it. `search`: over what that returns,
    within some seconds, or the planner's own; None where it finds nothing. All searches together take what
    ``planning_seconds`` leaves; where there is a link and no such limit, about as long as the first one.
    """
    if prepared.settings.calls != 1:
        return plan
    start, graph = time.perf_counter(), prepared.graph
    seconds, spent = prepared.settings.planning_seconds, plan.stage_seconds.get("search", 0.0)
    if seconds is None and graph.link is not None:      # looking for copies may take as long as it is given
        seconds = spent + max(spent, prepared.settings.of_planner.offload_seconds)
    wide = tuple(i for i, c in enumerate(graph.c)
                 if c.time - fastest(c) > WORTH * plan.step_seconds and _levels(c))
    for level in range(max((len(_levels(graph.c[i])) for i in wide), default=0), 0, -1):
        worth = (1 - WORTH) * plan.step_seconds
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
        schedule = prepared.with_kernels(by_own_kernels(found.plan.schedule), limit)
        result = prepared.simulate(schedule)
        if result.peak <= limit and result.seconds <= worth:
            plan = replace(plan, schedule=schedule, peak_bytes=result.peak, step_seconds=result.seconds,
                           runs=found.plan.runs, blocks=found.plan.blocks,
                           note=whole_note(prepared, found.said))
    return plan


def _least_bytes(prepared: Prepared, wide: Iterable[int]) -> int:
    """Bytes that some backward computation, or one of these, needs by itself."""
    graph, size = prepared.graph, [d.size for d in prepared.graph.d]
    fixed = set(graph.inputs)
    alone = [node.overhead + sum(size[j] for j in {*node.inputs, *node.outputs} - fixed)
             - max((size[j] for j in node.donors), default=0) for node in map(graph.c.__getitem__, wide)]
    return max(bytes_of_any(prepared), *alone)


def leaner_left_out(prepared: Prepared, wide: tuple[int, ...], level: int) -> Prepared:
    """The same graph, some computations of which have but the kernels from `level` on: from so many times
    larger tiles. `wide`: computations that have such kernels."""
    costs = dict(prepared.costs)
    for i in wide:
        costs[i] = _from(prepared.graph.c[i], level)
    return with_operation_costs(prepared.blocked, [costs[i] for i in range(len(prepared.graph.c))],
                                link=prepared.graph.link)


def _levels(node: CNode) -> list[int]:
    """Which of a computation's alternatives are the first with larger tiles, the leanest first."""
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
