"""Plans that make room for larger tiles.

Planners see wide computations by their leanest kernels, in many small tiles, and a finished schedule takes
faster ones where it leaves room (`rkmate.ir.kernels`). Where small tiles take much longer, it may pay to
compute something else again, and to have that room. So the same search runs with larger tiles as the leanest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rkmate.ir.cd import CNode, Cost
from rkmate.ir.kernels import by_own_kernels, fastest, seconds_to_gain
from rkmate.pipeline.bounds import seconds_of_any
from rkmate.pipeline.prepare import Prepared, with_operation_costs
from rkmate.show.plan import Plan

WORTH = 0.01
"""The share of a step that another search may gain at least, and that one computation's kernels do."""


def with_larger_tiles(plan: Plan, prepared: Prepared, limit: int,
                      search: Callable[[Prepared], Plan | None]) -> Plan:
    """A plan within `limit` bytes that is faster by its kernels, or the plan as it is.

    `prepared`: the graph of the plan. `search`: the plan for the same graph with other costs; None where
    there is none.
    """
    if prepared.settings.calls != 1:
        return plan
    start, graph = time.perf_counter(), prepared.graph
    wide = [i for i, c in enumerate(graph.c) if c.time - fastest(c) > WORTH * plan.step_seconds]
    for level in range(max((len(graph.c[i].alternatives) for i in wide), default=0), 0, -1):
        worth = (1 - WORTH) * plan.step_seconds
        if seconds_to_gain(graph, plan.schedule) < plan.step_seconds - worth:
            break
        larger = _leaner_left_out(prepared, wide, level)
        if seconds_of_any(larger, limit) > worth:
            continue
        found = search(larger)
        if found is None:
            continue
        schedule = prepared.with_kernels(by_own_kernels(found.schedule), limit)
        result = prepared.simulate(schedule)
        if result.peak <= limit and result.seconds <= worth:
            plan = replace(plan, schedule=schedule, peak_bytes=result.peak, step_seconds=result.seconds,
                           runs=found.runs, blocks=found.blocks, note=found.note,
                           stage_seconds={**plan.stage_seconds, "larger tiles": time.perf_counter() - start})
    return plan


def _leaner_left_out(prepared: Prepared, wide: list[int], level: int) -> Prepared:
    """The same graph, some computations of which have but the kernels from `level` on."""
    costs = dict(prepared.costs)
    for i in wide:
        costs[i] = _from(prepared.graph.c[i], level)
    return with_operation_costs(prepared.blocked, [costs[i] for i in range(len(prepared.graph.c))],
                                link=prepared.graph.link)


def _from(node: CNode, level: int) -> Cost:
    own, *others = node.alternatives[min(level, len(node.alternatives)) - 1:]
    return Cost(own.time, own.overhead, tuple(others))
