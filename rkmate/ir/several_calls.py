"""The memory of a step in which a module is called several times before the backward."""

from __future__ import annotations

from collections.abc import Iterable

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, Loss, Schedule
from rkmate.ir.simulate import buffers_of, simulate


def peak_of_calls(graph: CDGraph, schedule: Schedule, calls: int, *, reserve_at_loss: int = 0,
                  pinned: Iterable[int] = ()) -> int:
    """Return bytes alive at once, at most, in a step of `calls` forwards, one loss, and the backward of each.

    Every call follows the schedule, with values of its own. The backwards come one after the other, in any
    order. A parameter's gradients are added up, and wait for those of the last call. Raises `ScheduleError`
    as `simulate` does.
    """
    result = simulate(graph, schedule, reserve_at_loss=reserve_at_loss, pinned=pinned)
    if calls == 1:
        return result.peak
    others = calls - 1
    at = schedule.steps.index(Loss())
    forward, backward = result.timeline[:at], result.timeline[at + 1:]
    # What a call holds before its backward, the gradients of its outputs included; and after it, when the
    # buffers of its copies are gone.
    before = result.saved + graph.bytes(graph.output_grads)
    after = result.timeline[-1] - buffers_of(graph, schedule)
    leaves: dict[int, list[int]] = {}
    for j, i in graph.releases.items():
        leaves.setdefault(i, []).append(j)
    added_up = 0
    peak = max(calls * (result.saved + reserve_at_loss), calls * before,
               others * result.saved + max(forward, default=0))
    for step, level in zip(schedule.steps[at + 1:], backward, strict=True):
        peak = max(peak, others * before + level + added_up)
        if isinstance(step, Compute):
            added_up += graph.bytes(leaves.pop(step.c, ()))
    # The second backward, and the last one.
    highest = max(backward, default=0) + added_up
    return max(peak, (others - 1) * before + after + highest, others * after + highest)
