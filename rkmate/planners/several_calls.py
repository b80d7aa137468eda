"""Steps in which a module is called several times before the backward, or several modules share the memory.

While one call's backward runs, each of the others holds what it saves: a schedule that saves more leaves less
for the peak.

One module, called several times: a planner that knows one call alone is asked for several shares of the two:
what a call may hold at its loss is bounded by a larger reserve there. The simulator's word on the whole step
decides.

Several modules, each with plans of its own (the parts of a model that cannot be planned as a whole): a choice
takes the sum of what all hold, and once, the most that any of them takes on top of that while it runs. Where
a step was observed, its moments tell which of them hold something while one runs: early ones, while late ones
run, and not the reverse. For each bound on what a part takes while it runs, parts begin with the schedule
that saves least, and the gains that cost the fewest bytes a second are bought first (the greedy algorithm for
the linear relaxation of the multiple-choice knapsack problem: Sinha and Zoltners, Operations Research 27,
1979).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rkmate.ir.simulate import peak_of_calls, waiting_bytes
from rkmate.planners.protocol import (
    Candidate,
    Outcome,
    Planner,
    Problem,
    ask,
    best,
    found_in,
    smallest,
    whole_step,
)

# -- One module, called several times --------------------------------------------------------------

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Shares of the most that each call can hold within a budget: what is asked first."""
CLOSER = 2
"""Number of times that a share between the best and the next best one is asked afterwards."""
RESERVES = (0.0, 0.25, 0.5, 1.0)
"""Reserves that the smallest budget is looked for with, of the peak of the whole step of one call."""


def step_of_calls(problem: Problem, candidate: Candidate, calls: int) -> Candidate:
    """Return a schedule with the peak of the whole step of several calls."""
    peak = peak_of_calls(problem.graph, candidate.schedule, calls)
    return replace(candidate, peak=peak)


def ask_for_calls(planner: Planner, problem: Problem, calls: int, budget: int, *,
                  time_limit: float | None, known: Sequence[Candidate] | None) -> Outcome:
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
            part = problem.with_reserve(problem.graph.reserve_at_loss + int(share * whole))
            least = smallest(planner, part, 0)
            if least is not None:
                found += _judged(problem, part, ask(planner, part, least.peak), calls)
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
        self._waits = waiting_bytes(graph)
        self._outputs = graph.bytes({*graph.held, *graph.outputs})
        whole = problem.simulate(whole_step(problem).schedule)
        self._most = max(self._outputs, min(whole.saved, budget // calls - self._waits))

    def at(self, share: float) -> list[Candidate]:
        """Return schedules of which each call saves about so much of what it can."""
        saved = self._outputs + int(share * (self._most - self._outputs))
        limit = self.budget - (self.calls - 1) * (saved + self._waits)
        found: list[Candidate] = []
        for _ in range(2):
            if limit <= saved:
                break
            reserve = max(self.problem.graph.reserve_at_loss, limit - saved)
            part = self.problem.with_reserve(reserve)
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


# -- Several modules, each with plans of its own ---------------------------------------------------

@dataclass(frozen=True)
class Way:
    """The figures of a schedule that a part may follow."""

    seconds: float
    """Seconds of one call."""
    saved: int
    """Bytes that a call holds from its forward to its backward."""
    extra: int
    """Bytes that it takes on top of that while it runs."""

    def scaled(self, average: float, largest: float) -> Way:
        """Return the figures for calls of other sizes: the average one's, and the largest one's."""
        return self if average == largest == 1 else Way(
            self.seconds * average, ceil(self.saved * average), ceil(self.extra * largest))


@dataclass(frozen=True)
class Item:
    """A part, and the ways to run it."""

    ways: Sequence[Way]
    calls: int = 1
    """Number of calls of the part in a step: all of them follow one schedule."""


@dataclass(frozen=True)
class Moment:
    """A moment of a step: what the schedules of parts may take then is bounded."""

    bytes: int
    """Bytes that the rest of the step takes."""
    held: Mapping[int, int]
    """Number of an item -> how many of its calls hold what they save."""
    running: int | None = None
    """The item whose call runs, and takes its bytes on top; None where none does."""

    def taken(self, ways: Sequence[Way]) -> int:
        """Return the bytes at this moment, given the schedule of each item."""
        return self.bytes + sum(n * ways[k].saved for k, n in self.held.items()) + (
            0 if self.running is None else ways[self.running].extra)


@dataclass(frozen=True)
class Choice:
    """A way for each part."""

    ways: tuple[int, ...]
    """The number of each part's way."""
    saved: int
    """Bytes that all parts hold together."""
    extra: int
    """Bytes on top of that, at most."""
    seconds: float
    left: int = 0
    """Bytes within the limit that it never takes."""

    @property
    def peak(self) -> int:
        """Bytes that all parts hold, and one takes on top, at most."""
        return self.saved + self.extra


def share_out(items: Sequence[Item], limit: int, beside: int = 0, moments: Sequence[Moment] = ()
              ) -> Choice | None:
    """Choose a way for each part, the fastest together within a limit; None where no choice fits.

    Args:
        items: the parts.
        limit: bytes for all.
        beside: bytes that something else takes while all parts hold what they save, and none runs.
        moments: of the step; if given, each of them keeps to the limit, and `beside` does not count.
    """
    found = [choice for extra in _extras(items) if (choice := _within(
        items, limit, moments or _together(items, max(extra, beside)), extra)) is not None]
    return min(found, key=lambda c: (c.seconds, c.peak), default=None)


def smallest_limit(items: Sequence[Item], beside: int = 0, moments: Sequence[Moment] = ()) -> int:
    """Return the smallest limit for which `share_out` finds a choice, in bytes."""
    def least(extra: int) -> int:
        ways = [i.ways[_ladder(i.ways, extra)[0]] for i in items]
        return max(m.taken(ways) for m in moments or _together(items, max(extra, beside)))

    return min(map(least, _extras(items)), default=beside)


def _together(items: Sequence[Item], others: int) -> list[Moment]:
    """The one moment at which all parts hold what they save, next to other bytes."""
    return [Moment(others, {k: i.calls for k, i in enumerate(items)})]


def _extras(items: Sequence[Item]) -> list[int]:
    """The bounds on what a part takes while it runs for which each part has a way."""
    least = max((min(w.extra for w in i.ways) for i in items), default=0)
    return sorted({w.extra for i in items for w in i.ways if w.extra >= least})


def _within(items: Sequence[Item], limit: int, moments: Sequence[Moment], extra: int) -> Choice | None:
    ladders = [_ladder(i.ways, extra) for i in items]
    taken = [0] * len(items)
    first = [i.ways[ladder[0]] for i, ladder in zip(items, ladders, strict=True)]
    rooms = [limit - m.taken(first) for m in moments]
    if min(rooms, default=0) < 0:
        return None
    concerned = [[(number, m.held.get(k, 0), m.running == k) for number, m in enumerate(moments)
                  if k in m.held or m.running == k] for k in range(len(items))]
    heap: list[tuple[float, int]] = []

    def offer(k: int) -> None:
        ladder, step = ladders[k], taken[k]
        if step + 1 < len(ladder):
            heapq.heappush(heap, (_slope(items[k].ways, ladder[step], ladder[step + 1]), k))

    for k in range(len(items)):
        offer(k)
    while heap:
        _, k = heapq.heappop(heap)
        ladder, step = ladders[k], taken[k]
        now, then = items[k].ways[ladder[step]], items[k].ways[ladder[step + 1]]
        prices = [(number, calls * (then.saved - now.saved) + runs * (then.extra - now.extra))
                  for number, calls, runs in concerned[k]]
        if all(price <= rooms[number] for number, price in prices):
            for number, price in prices:
                rooms[number] -= price
            taken[k] += 1
            offer(k)
    numbers = tuple(ladder[t] for ladder, t in zip(ladders, taken, strict=True))
    chosen = [i.ways[n] for i, n in zip(items, numbers, strict=True)]
    return Choice(numbers, sum(i.calls * w.saved for i, w in zip(items, chosen, strict=True)),
                  max((w.extra for w in chosen), default=0),
                  sum(i.calls * w.seconds for i, w in zip(items, chosen, strict=True)),
                  min(rooms, default=limit))


def _ladder(ways: Sequence[Way], extra: int) -> list[int]:
    """The ways that each save a second for the fewest more bytes, from the leanest on: the lower convex
    hull."""
    order = sorted((k for k, w in enumerate(ways) if w.extra <= extra),
                   key=lambda k: (ways[k].saved, ways[k].seconds))
    hull: list[int] = []
    for k in order:
        if hull and ways[k].seconds >= ways[hull[-1]].seconds:
            continue
        while len(hull) > 1 and _slope(ways, hull[-2], k) <= _slope(ways, hull[-2], hull[-1]):
            hull.pop()
        hull.append(k)
    return hull


def _slope(ways: Sequence[Way], a: int, b: int) -> float:
    return (ways[b].seconds - ways[a].seconds) / max(1, ways[b].saved - ways[a].saved)
