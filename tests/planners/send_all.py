"""Schedules that send away all that waits, whatever the way there takes: the least that copying alone can do.

Nothing is weighed. What a schedule gains by it is the simulator's word, and what is worth sending a planner's
(Beaumont et al., "Efficient combination of rematerialization and offloading", NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Free, Leave, Loss, Schedule, Step
from rkmate.planners.offload import may_be_sent


class Gap(NamedTuple):
    """A time in which a D node is in memory and nothing reads it. Numbers are those of a schedule's steps."""

    d: int
    after: int
    """Where it begins: after a use, and after what is freed with that."""
    before: int
    """The next step that reads it."""


def gaps(graph: CDGraph, schedule: Schedule) -> list[Gap]:
    """Where D nodes that may be sent away wait.

    What leaves the graph stays (outputs, gradients of inputs and parameters), and what comes from outside, or
    is the user's.
    """
    may = may_be_sent(graph, gradients=True)
    steps = schedule.steps
    since: dict[int, int] = {}                  # D node -> its latest use
    found: list[Gap] = []
    for k, step in enumerate(steps):
        if isinstance(step, Free):
            since.pop(step.d, None)
        elif isinstance(step, Compute):
            node = graph.c[step.c]
            found += [Gap(j, clear_after(steps, since[j]), k) for j in node.inputs if j in since]
            since.update((j, k) for j in (*node.inputs, *node.outputs) if may[j])
    return [gap for gap in found if gap.after < gap.before]


def clear_after(steps: tuple[Step, ...], k: int) -> int:
    """The first step after step `k`, and after what is freed right after it."""
    k += 1
    while k < len(steps) and isinstance(steps[k], Free):
        k += 1
    return k


def inserted(schedule: Schedule, more: Iterable[tuple[int, Step]]) -> Schedule:
    """The schedule with further steps, each before the step of that number; those of one place in order."""
    at: dict[int, list[Step]] = {}
    for k, step in more:
        at.setdefault(k, []).append(step)
    steps: list[Step] = []
    for k, step in enumerate(schedule.steps):
        steps += [*at.get(k, ()), step]
    return Schedule((*steps, *at.get(len(schedule.steps), ())))


def send_all(graph: CDGraph, schedule: Schedule, *, every_gap: bool = False) -> Schedule:
    """All that the backward waits for is away meanwhile: it leaves right after its last use in the forward,
    and comes back right before its first one in the backward. `every_gap`: also between other two uses."""
    at_loss = schedule.steps.index(Loss())
    frees: list[tuple[int, Step]] = []
    outs: list[tuple[int, Step]] = []
    backs: list[tuple[int, Step]] = []
    sent: set[int] = set()
    for gap in gaps(graph, schedule):
        if not every_gap and not gap.after <= at_loss < gap.before:
            continue
        if gap.d in sent:
            frees.append((gap.after, Free(gap.d)))      # what is away is there to the end of the step
        else:
            outs += [(gap.after, CopyOut(gap.d)), (gap.after, Leave(gap.d))]
        backs.append((gap.before, CopyIn(gap.d)))
        sent.add(gap.d)
    return inserted(schedule, [*frees, *outs, *backs])
