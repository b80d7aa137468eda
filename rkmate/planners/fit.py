"""Make a schedule fit: forget what stands unused at its peak, and make it again before it is read.

A relaxation's schedule is fast, and needs somewhat more than the budget. The step where its peak stands
neither reads nor makes most of what is in memory then. Some of these values are forgotten before that step
and made again right before their next readers: those that take the least time for each byte, as long as less
of the schedule is above the budget afterwards. That is the policy of DTR (Kirisame et al., ICLR 2021,
section 2) with the future known: what is read next, and what making a value again takes then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.schedule import Compute, Free, Schedule
from rkmate.ir.simulate import Simulation
from rkmate.planners.finish import finished, without_waste
from rkmate.planners.protocol import Candidate, Problem

SIMULATIONS = 80
"""Schedules that are simulated for one that fits, at most."""
CHOICES = 8
"""Values that may be forgotten at one peak, at most: the others take more time."""


@dataclass(frozen=True)
class Fitted:
    """Result of a search for a budget."""

    candidate: Candidate | None
    """The schedule within the budget; None if there is none."""
    simulations: int
    """Number of schedules that were simulated: a measure of work that is the same on every machine."""


def fit(problem: Problem, schedule: Schedule, budget: int) -> Fitted:
    """Return a schedule whose peak is within `budget` bytes, and that makes again what a given one does, and
    more. One that is within the budget is finished only."""
    graph = problem.graph
    schedule = without_waste(graph, schedule.order, schedule.loss_at)
    result, done = problem.simulate(schedule), 1
    while result.peak > budget:
        above = _above(result, budget)
        for order, loss_at in _choices(problem, schedule, result, budget):
            if done == SIMULATIONS:
                return Fitted(None, done)
            smaller = without_waste(graph, order, loss_at)
            after, done = problem.simulate(smaller), done + 1
            if after.peak <= result.peak and _above(after, budget) < above:
                schedule, result = smaller, after
                break
        else:
            return Fitted(None, done)
    return Fitted(finished(problem, schedule, budget), done + 1)


def _above(result: Simulation, budget: int) -> int:
    """Return the bytes above the budget, added up over steps."""
    return sum(live - budget for live in result.timeline if live > budget)


def _choices(problem: Problem, schedule: Schedule, result: Simulation, budget: int
             ) -> Iterator[tuple[list[int], int]]:
    """Yield orders that forget more at the peak, and their numbers of computations before the loss: first as
    many values as bytes are missing, then one value each."""
    graph, order, held = problem.graph, schedule.order, frozenset(problem.graph.held)
    loss_at = schedule.loss_at
    there, before, position, busy = _memory(graph, schedule, result.peak_at)
    missing = result.peak - budget
    comes: dict[int, int] = {}          # the place of the next computation that reads or makes a value
    for k in range(position, len(order)):
        for j in (*graph.c[order[k]].inputs, *graph.c[order[k]].outputs):
            comes.setdefault(j, k)
    found: list[tuple[float, int, int, set[int]]] = []
    for j in there.difference(busy, held, graph.decided, graph.inputs):
        made = graph.producer[j]
        if made is None or made >= graph.loss or (position <= loss_at and j in graph.outputs):
            continue
        reader = comes.get(j)
        if reader is None or order[reader] == made:
            continue
        again = missing_nodes(graph, (j,), before[reader] - {j} | held)
        if again.isdisjoint(graph.once):
            seconds = sum(graph.c[i].time for i in again)
            found.append((seconds / max(1, min(graph.d[j].size, missing)), j, reader, again))
    found.sort()
    together, freed = 0, 0
    while freed < missing and together < len(found):
        freed += graph.d[found[together][1]].size
        together += 1
    for chosen in (found[:together], *([one] for one in found[:CHOICES])):
        yield _making_again(order, loss_at, [(reader, again) for _, _, reader, again in chosen])


def _making_again(order: Sequence[int], loss_at: int, added: Sequence[tuple[int, set[int]]]
                  ) -> tuple[list[int], int]:
    """Return an order with more computations before some places, and its number of those before the loss."""
    more: dict[int, set[int]] = {}
    for place, nodes in added:
        more.setdefault(place, set()).update(nodes)
    result: list[int] = []
    for k, i in enumerate(order):
        result += sorted(more.get(k, ()))
        result.append(i)
    return result, loss_at + sum(len(nodes) for k, nodes in more.items() if k < loss_at)


def _memory(graph: CDGraph, schedule: Schedule, at: int
            ) -> tuple[set[int], Sequence[frozenset[int]], int, set[int]]:
    """Return the D nodes in memory at a step, and before each computation; how many computations come until
    after that step; and what the step reads and makes."""
    alive, there, position = {*graph.inputs}, set[int](), 0
    before: list[frozenset[int]] = []
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            before.append(frozenset(alive))
            alive.update(graph.c[step.c].outputs)
        elif isinstance(step, Free):
            alive.discard(step.d)
        if k == at:
            there, position = set(alive), len(before)
    step = schedule.steps[at]
    node = graph.c[step.c] if isinstance(step, Compute) else None
    return there, before, position, set() if node is None else {*node.inputs, *node.outputs}
