"""Any planner, asked for a step in which the module is called several times before the backward.

While one call's backward runs, each of the others holds what it saves: a schedule that saves more
leaves less for the peak. A planner that knows one call alone is asked for several shares of the two: what a
call may hold at its loss is bounded by a larger reserve there. The simulator's word on the whole step
decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rkmate.ir.simulate import peak_of_calls
from rkmate.planners.protocol import (
    Candidate,
    Outcome,
    Planner,
    Problem,
    ask,
    best,
    found_in,
    smallest_budget,
    whole_step,
)

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Shares of the most that each call can hold within a budget: what is asked first."""
CLOSER = 2
"""Number of times that a share between the best and the next best one is asked afterwards."""
RESERVES = (0.0, 0.25, 0.5, 1.0)
"""Reserves that the smallest budget is looked for with, of the peak of the whole step of one call."""


def step_of_calls(problem: Problem, candidate: Candidate, calls: int) -> Candidate:
    """Return a schedule with the peak of the whole step of several calls."""
    peak = peak_of_calls(problem.graph, candidate.schedule, calls, pinned=problem.pinned,
                         reserve_at_loss=problem.reserve_at_loss)
    return replace(candidate, peak=peak)


def ask_for_calls(planner: Planner, problem: Problem, calls: int, budget: int, *,
                  time_limit: float | None = None, known: Sequence[Candidate] | None = None) -> Outcome:
    """Return the fastest schedule whose step of `calls` calls stays within `budget` bytes.

    `known`, and the outcome's `others`: schedules with their peaks of that many calls.
    """
    search = _Search(planner, problem, calls, budget, time_limit)
    found = [search.at(share) for share in SHARES]
    for _ in range(CLOSER):
        inside = sorted((seconds, share) for share, seconds in search.seconds.items())
        if len(inside) < 2:
            break
        found.append(search.at((inside[0][1] + inside[1][1]) / 2))
    pool = [*(known or ()), *(c for group in found for c in group)]
    outcome = best(pool, budget)
    if outcome.schedule is None:
        pool += smallest_steps(planner, problem, calls)
        outcome = best(pool, budget)
    winner = next((c for c in pool if c.schedule is outcome.schedule), None)
    return replace(outcome, ops=winner.ops if winner else (), others=tuple(pool))


def smallest_steps(planner: Planner, problem: Problem, calls: int) -> tuple[Candidate, ...]:
    """Return schedules of which one has the smallest known peak of `calls` calls. Depends only on the problem
    and the planner, whatever was asked before; empty if the planner has no schedule."""
    def make() -> tuple[Candidate, ...]:
        found: list[Candidate] = []
        whole = whole_step(problem).peak
        for share in RESERVES:
            part = replace(problem, reserve_at_loss=problem.reserve_at_loss + int(share * whole))
            least = smallest_budget(planner, part, 0)
            if least is not None:
                found += _judged(problem, part, ask(planner, part, least), calls)
        return tuple(sorted(found, key=lambda c: c.peak)[:1])

    return problem.once(("smallest step of calls", planner.name, calls), make)


def _judged(problem: Problem, part: Problem, outcome: Outcome, calls: int) -> list[Candidate]:
    return [step_of_calls(problem, c, calls) for c in found_in(part, outcome)]


class _Search:
    """State of the search for one budget."""

    def __init__(self, planner: Planner, problem: Problem, calls: int, budget: int,
                 time_limit: float | None) -> None:
        self.planner, self.problem, self.calls, self.budget = planner, problem, calls, budget
        self.time_limit = None if time_limit is None else time_limit / (len(SHARES) + CLOSER)
        self.seconds: dict[float, float] = {}
        """Share -> the time of the fastest schedule inside the budget."""
        graph = problem.graph
        self._grads = graph.bytes(graph.output_grads)
        self._outputs = graph.bytes(set(problem.pinned) | set(graph.outputs))
        whole = problem.simulate(whole_step(problem).schedule)
        self._most = max(self._outputs, min(whole.saved, budget // calls - self._grads))

    def at(self, share: float) -> list[Candidate]:
        """Return schedules of which each call saves about so much of what it can."""
        saved = self._outputs + int(share * (self._most - self._outputs))
        limit = self.budget - (self.calls - 1) * (saved + self._grads)
        found: list[Candidate] = []
        for _ in range(2):
            if limit <= saved:
                break
            reserve = max(self.problem.reserve_at_loss, limit - saved)
            part = replace(self.problem, reserve_at_loss=reserve)
            outcome = ask(self.planner, part, limit, time_limit=self.time_limit, known=())
            new = _judged(self.problem, part, outcome, self.calls)
            found += new
            # Gradients that wait for the other calls', and gradients of inputs, come on top.
            over = min((c.peak for c in new), default=0) - self.budget
            if over <= 0:
                break
            limit -= over
        self._note(share, found)
        return found

    def _note(self, share: float, found: Iterable[Candidate]) -> None:
        inside = [c.seconds for c in found if c.peak <= self.budget]
        if inside:
            self.seconds[share] = min(inside)
