"""Orders near an order: with fewer recomputations, whose values then stay, or are copied; or with more, for
values that then need not be copied."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rkmate.ir.cd import CDGraph
from rkmate.ir.recompute import missing_nodes
from rkmate.ir.schedule import Compute, Free, Loss, Schedule, freed_after, from_order
from rkmate.planners.finish import without_runs, without_waste


def without_copies(graph: CDGraph, schedule: Schedule, pinned: Collection[int]) -> Schedule:
    """The same computations with everything that is needed again in memory."""
    return from_order(graph, schedule.order, schedule.loss_at, pinned)


def runs_by_price(graph: CDGraph, schedule: Schedule) -> list[int]:
    """The step indices of all recomputations, those first that take longest for each byte that would have to
    be kept or copied in their place."""
    seen: set[int] = set()
    found: list[tuple[float, int]] = []
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            if step.c in seen:
                gone = freed_after(schedule.steps, k)
                node = graph.c[step.c]
                kept = graph.bytes(j for j in node.outputs if j not in gone)
                found.append((-node.time / (kept + 1), k))
            seen.add(step.c)
    return [k for _, k in sorted(found)]


def fewer_runs(graph: CDGraph, schedule: Schedule, dropped: Collection[int],
               pinned: Sequence[int]) -> Schedule:
    """The schedule without the recomputations at some step indices, nor what ran again only for them."""
    order, loss_at = without_runs(schedule, set(dropped))
    return without_waste(graph, from_order(graph, order, loss_at, pinned), tuple(pinned))


def one_more_run(graph: CDGraph, schedule: Schedule, d: int, at: int,
                 pinned: Sequence[int]) -> Schedule | None:
    """The schedule that makes a D node anew right before the step with index `at`, which reads it; None where
    what decides, or adds to a gradient, would run again."""
    alive = set(graph.inputs)
    order: list[int] = []
    loss_at = place = 0
    for k, step in enumerate(schedule.steps):
        if k == at:
            place = len(order)
            runs = sorted(missing_nodes(graph, [d], alive - {d}))
            if any(graph.c[i].decides for i in runs):
                return None
            order += runs
        if isinstance(step, Loss):
            loss_at = len(order)
        elif isinstance(step, Compute):
            order.append(step.c)
            if k < at:
                alive.update(graph.c[step.c].outputs)
        elif isinstance(step, Free) and k < at:
            alive.discard(step.d)
    assert place
    return without_waste(graph, from_order(graph, order, loss_at, pinned), tuple(pinned))
