"""Plans that copy data away and back, made of plans that do not."""

from __future__ import annotations

import functools
from dataclasses import replace

import rkmate
from rkmate.ir.link import Link
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Free, Leave, Loss, Schedule, Step
from rkmate.ir.simulate import simulate
from tests.show.models import PLANS

BUFFERS = 4096
PLACE = "/scratch"


def sending(plan: rkmate.Plan, part: float, *, later: int = 0, early: int = 0,
            most: int | None = None) -> rkmate.Plan:
    """The plan, with (at most `most`) activations sent over the loss through a link that takes `part` of the
    step for all of them. Each goes after its last use, leaves `later` computations after that, and comes
    `early` computations before it is read."""
    graph, steps = plan.graph, plan.schedule.steps
    loss = steps.index(Loss())
    touched = {k: {*graph.cd.c[s.c].inputs, *graph.cd.c[s.c].outputs}
               for k, s in enumerate(steps) if isinstance(s, Compute)}
    before: dict[int, list[Step]] = {}
    chosen = _sendable(plan)[:most]
    for j in chosen:
        last = max(k for k, these in touched.items() if j in these and k < loss)
        first = min(k for k, these in touched.items() if j in these and k > loss)
        going = [*(k for k in touched if last < k < loss), loss]
        coming = [k for k in touched if loss < k <= first]
        before.setdefault(going[0], []).append(CopyOut(j))
        before.setdefault(going[min(later, len(going) - 1)], []).append(Leave(j))
        before.setdefault(coming[-1 - min(early, len(coming) - 1)], []).append(CopyIn(j))
    rate = max(graph.cd.bytes(chosen), 1) / (part * plan.baseline_seconds)
    graph = graph.with_link(Link(rate, 2 * rate, buffer_bytes=BUFFERS, place=PLACE))
    schedule = Schedule(tuple(s for k, step in enumerate(steps) for s in (*before.get(k, ()), step)))
    judged = simulate(graph.cd, schedule)
    return replace(plan, graph=graph, schedule=schedule, peak_bytes=judged.peak, step_seconds=judged.seconds,
                   budget_bytes=max(plan.budget_bytes, judged.peak), bound_seconds=None)


def _sendable(plan: rkmate.Plan) -> list[int]:
    """What the forward makes once, and keeps for the backward."""
    graph, steps = plan.graph, plan.schedule.steps
    loss = steps.index(Loss())
    freed = {s.d for s in steps[:loss] if isinstance(s, Free)}
    stays = {*graph.cd.held, *graph.cd.outputs, *graph.cd.decided, *freed}
    read = {j for s in steps[loss:] if isinstance(s, Compute) for j in graph.cd.c[s.c].inputs}
    return [j for s in steps[:loss] if isinstance(s, Compute) for j in graph.cd.c[s.c].outputs
            if j in read and j not in stays and graph.cd.d[j].size]


@functools.cache
def sent_plan(name: str) -> rkmate.Plan:
    """`slow`: a link on which the step waits; `fast`: one on which it does not; `some`: five tensors of a
    plan that recomputes others; `none`: nothing is sent, though there is a link; `whole`: nor has to be."""
    if name in ("some", "none"):
        half = PLANS["half"]()
        return sending(half, 1e-5, later=2, early=1, most=5) if name == "some" else \
            sending(half, 1.0, most=0)
    kept = PLANS["all kept"]()
    return {"slow": lambda: sending(kept, 2.0), "fast": lambda: sending(kept, 1e-5, later=4, early=6),
            "whole": lambda: sending(kept, 1.0, most=0)}[name]()
