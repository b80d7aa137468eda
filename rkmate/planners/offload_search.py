"""Plan recomputation and copies together: the schedule whose copies make the fastest step.

A schedule for a larger budget recomputes less, and copies bring it within the smaller one; how much larger
is best is tried out. Then recomputations are traded for copies, those first that take longest for the bytes
of their outputs, and copies that are waited for are traded for recomputations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.schedule import Compute, Free, Loss, Schedule, freed_after, from_order
from rkmate.planners.finish import without_runs, without_waste
from rkmate.planners.offload import Offloaded, gaps_of, offload
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, found_in, infeasible, whole_step
from rkmate.planners.settings import PlannerSettings


def without_copies(graph: CDGraph, schedule: Schedule) -> Schedule:
    """Return the schedule of the same computations that keeps everything that is needed again in memory."""
    return from_order(graph, schedule.order, schedule.loss_at)


def runs_by_price(graph: CDGraph, schedule: Schedule) -> list[int]:
    """Return the step indices of all recomputations, those first that take longest for each byte that would
    have to be kept or copied in their place."""
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


def fewer_runs(graph: CDGraph, schedule: Schedule, dropped: Collection[int]) -> Schedule:
    """Return the schedule without the recomputations at `dropped` step indices, nor what ran again only for
    them."""
    order, loss_at = without_runs(schedule, set(dropped))
    return without_waste(graph, order, loss_at)


def one_more_run(graph: CDGraph, schedule: Schedule, d: int, at: int) -> Schedule | None:
    """Return the schedule that makes a value of the forward (`d`) anew right before the step with index `at`,
    which reads it; None if a computation that decides would run again."""
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
    return without_waste(graph, order, loss_at)


NEAR = 1e-9
"""Relative: what is nearer is equal."""
SHARES = (0.6, 0.35, 0.15, 0.05)
"""Positions of the larger budgets between the budget and the whole step's peak, on a scale of ratios."""
BASE_SECONDS = 1.5
"""Seconds for each larger budget, if its planner can stop early."""
OF_PLAN, OF_BASE = 0.5, 0.125
"""Shares of the time that is left, where it is limited: what copies for the whole step may take, the plan
without copies, and the program with them; and each of the larger budgets."""
DROPPED = 6
"""Number of times that the number of dropped recomputations is halved, or moved by as much."""
SMALLEST_TRIES = 12
"""Number of times that the range of the smallest budget is halved, if the smallest budget is not simply the
one without all data that may be away."""
ONCE = "nothing needs to be recomputed"
NOTE = "what does not fit is copied away meanwhile"

Plan = Callable[[Problem, int, float | None, Sequence[Candidate] | None], Outcome]
"""Function that plans without copies: takes a problem, a budget, a limit in seconds, and known candidates of
other budgets."""


def without_link(problem: Problem) -> Problem:
    """Return the problem without its link: nothing can be sent away."""
    return problem.once("without a link", lambda: replace(problem, graph=replace(problem.graph, link=None)))


@dataclass(frozen=True)
class Offloading:
    """Planner of recomputation and copies, based on a planner of recomputation alone."""

    plan: Plan
    smallest_plan: Callable[[Problem], Candidate]
    """The schedule with the smallest peak that is known, without copies."""
    save_set: Callable[[Problem, int, float | None], Outcome]
    """A further planner, asked for some seconds: its bound holds for schedules with copies."""
    seconds: float
    """Seconds to search for copies, in addition to planning without copies; and seconds to search for the
    copies with the smallest peak of a schedule."""
    near: float
    """Relative distance to its lower bound at which a schedule is good enough."""

    def search(self, problem: Problem, budget: int, time_limit: float | None,
               known: Sequence[Candidate] | None) -> Outcome:
        """Return the fastest schedule within a budget. `time_limit`: seconds, of all that can stop early.
        `known`: what was found for other budgets; None at the first one."""
        whole = whole_step(problem)
        if whole.peak <= budget:
            return Outcome(whole.schedule, "ok", whole.seconds, bound=whole.seconds, note=ONCE)
        search = _Search(problem, budget, self.seconds, time_limit, self.near)
        search.take(c for c in known or () if c.schedule.copied)
        search.send(whole, OF_PLAN)
        if not search.is_near:
            self._recompute(search, known)
        outcome = best(search.inside, budget)
        if outcome.schedule is None:
            least = self.smallest(problem)
            if least.peak > budget:
                return replace(infeasible(search.note), bound=search.bound, others=tuple(search.others))
            outcome = best([least], budget)
        assert outcome.schedule is not None
        peaks = [problem.simulate(outcome.schedule).peak, *(c.peak for c in search.inside)]
        return replace(outcome, bound=search.bound, smallest=min(peaks),
                       others=(*search.inside, *search.others))

    def _recompute(self, search: _Search, known: Sequence[Candidate] | None) -> None:
        problem, budget = search.problem, search.budget
        own = without_link(problem)
        plain = None if known is None else [c for c in known if not c.schedule.copied]
        outcome = self.plan(own, budget, search.part(OF_PLAN), plain)
        search.note = outcome.note
        found = [*(plain or ()), *found_in(own, outcome)]
        search.take(found_in(own, outcome))
        if search.is_near:
            return
        outcome = self.save_set(problem, budget, search.part(OF_PLAN))
        search.take(found_in(problem, outcome))
        if outcome.bound is not None:
            search.bound = max(search.bound, outcome.bound)
        ratio = whole_step(problem).peak / max(1, budget)
        for share in SHARES:
            if search.left <= 0:
                break
            outcome = self.plan(own, int(budget * ratio ** share), search.part(OF_BASE, BASE_SECONDS), found)
            found += found_in(own, outcome)
            search.take(found_in(own, outcome))
        for c in sorted(found, key=lambda c: c.seconds):
            search.send(c)
        search.trade()

    def smallest(self, problem: Problem) -> Candidate:
        """Return the schedule with the smallest peak that is known, with copies where they make it
        smaller."""
        plain = self.smallest_plan(without_link(problem))
        found = [plain, *(c for base in (whole_step(problem), plain) if (c := problem.once(
            ("smallest with copies", base.schedule, self.seconds),
            partial(smallest_with_copies, problem, base, self.seconds))) is not None)]
        return min(found, key=lambda c: (c.peak, c.seconds))


class _Search:
    """State of the search for one budget."""

    def __init__(self, problem: Problem, budget: int, seconds: float, time_limit: float | None,
                 near: float) -> None:
        self.problem, self.budget, self.near = problem, budget, near
        self.bound = sum(c.time for c in problem.graph.c)
        self.note = ""
        self.inside: list[Candidate] = []
        self.others: list[Candidate] = []
        self._copying = seconds
        self._until = math.inf if time_limit is None else time.perf_counter() + time_limit
        self._sent: set[Schedule] = set()

    @property
    def fastest(self) -> float:
        """Seconds of the fastest schedule that fits; inf without one."""
        return min((c.seconds for c in self.inside), default=math.inf)

    @property
    def is_near(self) -> bool:
        """Whether the fastest is near enough to the bound."""
        return self.fastest <= self.bound * (1 + self.near)

    @property
    def left(self) -> float:
        """Seconds for copies."""
        return min(self._copying, self._until - time.perf_counter())

    def part(self, share: float, most: float = math.inf) -> float | None:
        """Return a share of the time that is left for everything, at most `most` seconds; None: no limit."""
        seconds = min(most, share * (self._until - time.perf_counter()))
        return None if math.isinf(seconds) else max(0.0, seconds)

    def take(self, candidates: Iterable[Candidate]) -> None:
        """Add schedules unchanged."""
        for c in candidates:
            (self.inside if c.peak <= self.budget else self.others).append(c)

    def send(self, base: Candidate, share: float = 1.0) -> Candidate | None:
        """Return a schedule's computations with copies, where that may be faster than what is known; what
        came of it. `share`: of the time that is left for everything, what it may take."""
        graph, start = self.problem.graph, time.perf_counter()
        if self.left <= 0 or self.is_near or base.schedule in self._sent or base.schedule.copied \
                or base.schedule.seconds(graph) >= self.fastest * (1 - NEAR):
            return None
        self._sent.add(base.schedule)
        found = offload(graph, base.schedule, self.budget,
                        until=min(start + self._copying, start + share * (self._until - start)))
        self._copying -= time.perf_counter() - start
        if found is None:
            return None
        c = _candidate(found, base.note)
        self.inside.append(c)
        return c

    def trade(self) -> None:
        """Search for better schedules near the fastest ones."""
        self._until = time.perf_counter() + self.left
        bases: dict[Schedule, Candidate] = {}
        for c in sorted(self.inside, key=lambda c: (c.seconds, c.peak)):
            alone = without_copies(self.problem.graph, c.schedule)
            bases.setdefault(alone, replace(c, schedule=alone))
        for base in list(bases.values())[:2]:
            self._drop_many(base)
        while not self._is_over() and self._trade_one():
            pass

    def _is_over(self) -> bool:
        return self.is_near or self.left <= 0

    def _drop_many(self, base: Candidate) -> None:
        """Drop the most expensive of a schedule's recomputations; try several numbers of them."""
        graph = self.problem.graph
        runs = runs_by_price(graph, base.schedule)
        step = number = len(runs) / 2
        for _ in range(DROPPED):
            tried = []
            for n in dict.fromkeys((round(number), round(number - step / 2), round(number + step / 2))):
                if 0 < n <= len(runs) and not self._is_over():
                    fewer = fewer_runs(graph, base.schedule, runs[:n])
                    found = self.send(replace(base, schedule=fewer))
                    if found is not None:
                        tried.append((found.seconds, n))
            if tried:
                number = min(tried)[1]
            step /= 2

    def _trade_one(self) -> bool:
        """Drop one recomputation, or one copy, of the fastest schedule. Returns whether that was faster."""
        graph = self.problem.graph
        c = min(self.inside, key=lambda c: (c.seconds, c.peak), default=None)
        if c is None:
            return False
        base = without_copies(graph, c.schedule)
        before = self.fastest
        for k in runs_by_price(graph, base):
            self.send(replace(c, schedule=fewer_runs(graph, base, [k])))
            if self._is_over() or self.fastest < before:
                return self.fastest < before
        link = self.problem.graph.link
        assert link is not None
        if not link.computing_seconds_per_byte \
                and self.problem.simulate(c.schedule).stalled <= NEAR * before:
            return False
        gaps = gaps_of(graph, base)
        copied = c.schedule.copied
        for d, m in sorted(zip(gaps.d.tolist(), gaps.next.tolist(), strict=True), key=lambda pair: -pair[1]):
            if d in copied and m > gaps.loss:
                more = one_more_run(graph, base, d, int(gaps.begins[m]))
                if more is not None:
                    self.send(replace(c, schedule=more))
                if self._is_over() or self.fastest < before:
                    return self.fastest < before
        return False


def _candidate(found: Offloaded, note: str) -> Candidate:
    """Return a candidate with the note of the schedule that it comes from, if that note still describes its
    recomputations."""
    how = note.removesuffix(NOTE).removesuffix("; ") if found.schedule.recomputed() else ONCE
    words = [part for part in (how, NOTE if found.schedule.copied else "") if part]
    return Candidate(found.schedule, found.simulation.peak, found.simulation.seconds, "; ".join(words))


def _halfway(until: float) -> float:
    """Return the time halfway between now and `until`."""
    return (time.perf_counter() + until) / 2


def smallest_with_copies(problem: Problem, base: Candidate, seconds: float) -> Candidate | None:
    """Return the smallest peak that copies make of a schedule, however long they take. `seconds`: of looking
    for it; each try has half of what is left."""
    until = time.perf_counter() + seconds
    link = problem.graph.link
    assert link is not None
    gaps = gaps_of(problem.graph, base.schedule)
    low, high = gaps.least + link.buffer_bytes, base.peak
    found = offload(problem.graph, base.schedule, low, until=_halfway(until))
    if found is None:
        for _ in range(SMALLEST_TRIES):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            tried = offload(problem.graph, base.schedule, middle, until=_halfway(until))
            if tried is None:
                low = middle
            else:
                found, high = tried, tried.simulation.peak
    return None if found is None else _candidate(found, base.note)


def whole_at_once(graph: CDGraph, whole: Schedule, budget: int, settings: PlannerSettings, *,
                  time_limit: float | None) -> Outcome | None:
    """Return the whole step with copies, where they do not make it slower to speak of; None where they do,
    and something else may be faster. `whole`: the step without recomputations; it needs more than the
    budget."""
    seconds = settings.offload_seconds if time_limit is None else min(time_limit, settings.offload_seconds)
    found = offload(graph, whole, budget, until=time.perf_counter() + seconds)
    bound = sum(c.time for c in graph.c)
    if found is None or found.simulation.seconds > bound * (1 + settings.gap_tolerance):
        return None
    c = _candidate(found, "")
    return Outcome(c.schedule, "ok", c.seconds, bound=bound, note=c.note, smallest=c.peak, others=(c,))
