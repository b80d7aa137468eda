"""The finishing pass: spend the memory that a schedule leaves unused.

A planner's model of memory is coarser than the simulator's (slots, persistence, options), so its
schedule often has bytes to spare. Each recomputation whose outputs could have stayed since their
last use is dropped, dearest per byte first. The result only ever gets faster, and stays within the
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rkmate.ir import recompute
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, Loss, Schedule, as_wished, freed_after, from_order
from rkmate.ir.simulate import Simulation, simulate
from rkmate.planners.protocol import Candidate, Problem

_ROUNDS = 8


def finish(graph: CDGraph, schedule: Schedule, budget: int, *,
           judge: Callable[[Schedule], Simulation] | None = None) -> Schedule:
    """Return a schedule at least as fast as `schedule`, whose simulated peak is within `budget` bytes.

    `schedule` itself must be within the budget. One with copies is returned as it is: what they spare is
    spent already. `judge`: a simulator of this graph that remembers what it was asked.
    """
    if schedule.copied:
        return schedule
    judge = judge or partial(simulate, graph)
    best = without_waste(graph, schedule.order, schedule.loss_at)
    found = judge(best)
    for _ in range(_ROUNDS):
        dropped = _keep_more(graph, best, found.timeline, budget)
        if not dropped:
            return best
        order, loss_at = without_runs(best, dropped)
        shorter = without_waste(graph, order, loss_at)
        after = judge(shorter)
        if after.peak > budget:
            return best
        best, found = shorter, after
    return best


def finished(problem: Problem, schedule: Schedule, budget: int) -> Candidate:
    """Return what `finish` makes of a schedule within the budget, with its simulated figures."""
    schedule = finish(problem.graph, schedule, budget, judge=problem.simulate)
    result = problem.simulate(schedule)
    return Candidate(schedule, result.peak, result.seconds)


def without_runs(schedule: Schedule, places: set[int]) -> tuple[list[int], int]:
    """Return a schedule's order without the computations at some step indices, and where the loss stands
    then."""
    order: list[int] = []
    loss_at = 0
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Loss):
            loss_at = len(order)
        elif isinstance(step, Compute) and k not in places:
            order.append(step.c)
    return order, loss_at


def without_waste(graph: CDGraph, order: Sequence[int], loss_at: int) -> Schedule:
    """Return the schedule of an order without repeated computations none of whose outputs is read before it
    is made anew.

    What the user holds is never made anew: it is there.
    """
    lean = recompute.without_waste(graph, *as_wished(graph, list(order), loss_at))
    return from_order(graph, lean.order, lean.loss_at)


def _keep_more(graph: CDGraph, schedule: Schedule, memory: Sequence[int], budget: int) -> set[int]:
    """Step indices of recomputations that can go together within the budget. `memory`: the simulator's, per
    step."""
    steps = schedule.steps
    last_use: dict[int, int] = {}
    candidates: list[tuple[float, int, list[tuple[int, int, int]]]] = []
    seen: set[int] = set()
    for k, step in enumerate(steps):
        if not isinstance(step, Compute):
            continue
        node = graph.c[step.c]
        if step.c in seen and graph.forgotten.isdisjoint(node.outputs):
            gone = freed_after(steps, k)
            gaps = [(last_use[j], k, graph.d[j].size) for j in node.outputs
                    if j not in gone and j not in graph.held]
            area = sum(size * (b - a) for a, b, size in gaps)
            candidates.append((-node.time / (area + 1), k, gaps))
        seen.add(step.c)
        for j in (*node.inputs, *node.outputs):
            last_use[j] = k
    dropped: set[int] = set()
    room = budget - np.array(memory, dtype=np.int64)
    for _, k, gaps in sorted(candidates):
        spent: list[tuple[int, int, int]] = []
        for a, b, size in gaps:
            between = room[a + 1:b]
            if between.size and int(between.min()) < size:
                break
            between -= size
            spent.append((a, b, size))
        if len(spent) == len(gaps):
            dropped.add(k)
        else:
            for a, b, size in spent:
                room[a + 1:b] += size
    return dropped
