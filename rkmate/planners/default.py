"""The default planner of `wrap`, the fastest of several strategies' schedules, and ``"auto"``, the best plan
of several planners.

A table says which strategy is asked when, and for how long; each schedule is then finished
(`rkmate.planners.finish`), and the fastest counts. The chain's dynamic program is Rockmate's (algorithm
1, last two phases).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rkmate.planners import settings as planner_settings
from rkmate.planners.chain import CHECKPOINTING, ChainSearch, smallest_of_chain
from rkmate.planners.finish import finished
from rkmate.planners.fit import SIMULATIONS, fit
from rkmate.planners.offload_search import Offloading
from rkmate.planners.protocol import (
    Candidate,
    Composed,
    Outcome,
    Planner,
    Problem,
    ask,
    best,
    found_in,
    infeasible,
    taken_in,
    whole_step,
)
from rkmate.planners.save_set import SaveSet, save_set_program
from rkmate.planners.settings import PlannerSettings
from rkmate.support.defaults import DEFAULT_PLANNER

# -- Several planners within a limit of time -------------------------------------------------------

TIME_LIMIT = 30.0
"""Seconds of planning, where the caller names no limit."""


@dataclass(frozen=True)
class Auto:
    """Asks planners in order, until the time is over; says which plan it took, and why."""

    default: Composed
    """The default planner, asked whatever the time; it says which budgets can be met."""
    before: tuple[Planner, ...] = ()
    """Planners asked before the default: those that answer at once."""
    after: tuple[Planner, ...] = ()
    """Planners asked after the default, in the time that is left."""
    name: str = "auto"

    @property
    def _planners(self) -> tuple[Planner, ...]:
        """All planners in order."""
        return (*self.before, self.default, *self.after)

    @property
    def asks(self) -> tuple[str, ...]:
        """Names of the planners that this one asks."""
        return tuple(planner.name for planner in self._planners)

    def with_settings(self, settings: PlannerSettings) -> Auto:
        """Return a copy of the planner whose default planner has other settings."""
        configured = getattr(self.default, "with_settings", None)
        return self if configured is None else replace(self, default=configured(settings))

    def smallest(self, problem: Problem, above: int) -> Candidate:
        """Return the schedule with the smallest peak that is found (`Composed.smallest`)."""
        return self.default.smallest(problem, above)

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None,
             known: Sequence[Candidate] | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Composed`. The bound is the default's."""
        limit = TIME_LIMIT if time_limit is None else time_limit
        start = time.perf_counter()
        least = bound = sum(c.time for c in problem.graph.c)
        tried: list[tuple[str, Outcome]] = []
        skipped: list[str] = []
        for planner in self._planners:
            left = max(0.0, limit - (time.perf_counter() - start))
            if not left and planner is not self.default:
                skipped.append(planner.name)
                continue
            outcome = ask(planner, problem, budget, time_limit=left,
                          known=known if planner is self.default else None)
            tried.append((planner.name, outcome))
            if planner is self.default and outcome.bound is not None:
                bound = max(bound, outcome.bound)
            if outcome.seconds <= least * (1 + 1e-12):
                break       # nothing is recomputed: no planner can do better
        found = [(outcome.seconds, k) for k, (_, outcome) in enumerate(tried)
                 if outcome.schedule is not None]
        late = f"; no time for {', '.join(skipped)}" if skipped else ""
        others = tuple(c for _, outcome in tried for c in outcome.others)
        if not found:
            outcome = replace(infeasible(f"none of {', '.join(n for n, _ in tried)} fits{late}"),
                              others=others)
            timed_out = skipped or any(o.status == "timeout" for _, o in tried)
            return replace(outcome, status="timeout") if timed_out else outcome
        _, k = min(found)
        name, winner = tried[k]
        against = [f"{other} {_ratio(outcome, least)}" for other, outcome in tried if other != name]
        note = f"{name}: {_ratio(winner, least)} of the time without recomputation" \
            f"{', against ' if against else ''}{', '.join(against)}{late}"
        return replace(winner, bound=min(bound, winner.seconds), note=note, others=others)


def _ratio(outcome: Outcome, least: float) -> str:
    if not math.isfinite(outcome.seconds):
        return outcome.status
    return f"{outcome.seconds / least:.3f}" if least else "1.000"


# -- The strategies --------------------------------------------------------------------------------

Case = Literal["first", "further", "deep", "below first", "below further"]
"""The first budget of a problem; a further one, also of a deep graph; the same below what the chain
reaches."""
DETERMINED: frozenset[Case] = frozenset({"first", "further"})
SLOWEST = 10.0
"""A search that counts its work is ended by the clock after this multiple of its seconds."""
KNOWN = 4
"""Number of schedules of other budgets that are finished again; one for deep graphs."""
HOPELESS = 4.0
"""A schedule that takes this many times as long as the fastest one is not finished: it is one of a long chain
that begins again at each block, of as many steps as the square of the chain's length."""
SMALLEST_TRIES = 24
"""Number of times that the smallest budget's range is halved, at most."""

_WORDS = {"rk-rotor": "the chain's dynamic program (rk-Rotor)",
          "save-set": "the integer program on the whole graph (save-set)",
          "sequential": "layers that run again as a whole, as under torch.utils.checkpoint"}


@dataclass(frozen=True)
class Entry:
    """A strategy: when it is asked, and for how long."""

    strategy: Planner
    origin: str
    """The planner of the registry that it is of."""
    cases: frozenset[Case]
    """The cases in which it is asked."""
    seconds: float = math.inf
    """The strategy's share of the time, where it can stop early."""
    gap: float | None = None
    """Smallest distance of the best schedule above the bound, relative to the bound, for which it is asked;
    None: it is always asked."""
    after_cut: bool = False
    """Whether the strategy is asked only if the one that gives the bound was cut short, after the
    schedules found before are finished."""
    finished: int = 1
    """Number of the strategy's schedules that are finished."""


def table(settings: PlannerSettings, save_set: Planner) -> tuple[Entry, ...]:
    """Return the strategies in the order in which they are asked."""
    s = settings
    return (
        Entry(ChainSearch(s, tries=5, count=1, quick=True), "rk-rotor", frozenset({"deep"})),
        Entry(save_set, "save-set", frozenset({"deep"}), min(s.save_set_seconds, s.deep_seconds)),
        Entry(save_set, "save-set", DETERMINED, s.save_set_seconds),
        Entry(ChainSearch(s), "rk-rotor", DETERMINED, gap=s.chain_gap, finished=2),
        Entry(CHECKPOINTING, "sequential", frozenset({*DETERMINED, "deep"}), gap=s.gap_tolerance),
        Entry(save_set, "save-set", frozenset({"first"}), s.first_seconds, gap=s.wide_gap, after_cut=True),
        Entry(save_set, "save-set", frozenset({"below first"}), max(s.first_seconds, s.save_set_seconds)),
        Entry(save_set, "save-set", frozenset({"below further"}), s.save_set_seconds),
    )


@dataclass(frozen=True)
class Default:
    """The default planner. Its bound holds for schedules that run each backward computation once, in order.
    If data can be sent away, it holds for schedules that also run the forward in order, and send forward
    values."""

    settings: PlannerSettings | None = None
    """Settings of the search; None: the default settings."""
    save_set: Planner = SaveSet()
    """Planner that solves the program over the whole graph."""
    name: str = DEFAULT_PLANNER

    @property
    def asks(self) -> tuple[str, ...]:
        """Names of the planners that this one asks."""
        return tuple(dict.fromkeys(e.origin for e in table(self._settings, self.save_set)))

    @property
    def _settings(self) -> PlannerSettings:
        return self.settings or planner_settings.DEFAULT.now()

    def with_settings(self, settings: PlannerSettings) -> Default:
        """Return a copy of the planner with other settings."""
        return replace(self, settings=settings)

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None,
             known: Sequence[Candidate] | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Composed`. The schedule has copies if the problem has a link."""
        plan = self._plan if problem.graph.link is None else self._offloading().search
        return plan(problem, budget, time_limit, known)

    def smallest(self, problem: Problem, above: int) -> Candidate:
        """Return the schedule with the smallest peak that is found (`Composed.smallest`)."""
        least = self._smallest if problem.graph.link is None else self._offloading().smallest
        return least(problem)

    def _offloading(self) -> Offloading:
        settings = self._settings
        return Offloading(
            self._plan, self._smallest,
            lambda problem, budget, seconds: self.save_set.plan(problem, budget, time_limit=min(
                settings.save_set_seconds, math.inf if seconds is None else seconds)),
            settings.offload_seconds, settings.gap_tolerance)

    def _plan(self, problem: Problem, budget: int, time_limit: float | None,
              known: Sequence[Candidate] | None) -> Outcome:
        """Plan without copies. `known`: schedules of other budgets; None at the first budget."""
        whole = whole_step(problem)
        if whole.peak <= budget:
            return Outcome(whole.schedule, "ok", whole.seconds, bound=whole.seconds,
                           note="nothing needs to be recomputed" if not problem.graph.forgotten else
                           "nothing is recomputed except what is wished")
        settings, least = self._settings, smallest_of_chain(problem).peak
        further = known is not None
        if least > budget:
            case: Case = "below further" if further else "below first"
        else:
            deep = len(problem.graph.c) > settings.deep_nodes
            case = ("deep" if deep else "further") if further else "first"
        search = _Search(problem, budget, math.inf if time_limit is None else time_limit)
        # Which of them gains most from the memory that is left is known once they are finished.
        inside = [c for c in known or () if c.peak <= budget]
        search.pending += sorted(inside, key=lambda c: (c.seconds, c.peak))[:1 if case == "deep" else KNOWN]
        for entry in table(settings, self.save_set):
            if case in entry.cases:
                search.ask(entry)
        search.finish(settings.gap_tolerance)
        if not search.found and case.startswith("below"):
            reached = self._smallest(problem)
            if reached.peak <= budget:
                search.pending.append(reached)
                search.finish(settings.gap_tolerance)
        outcome = best(search.found, budget)
        if outcome.schedule is None:
            return replace(infeasible(f"the chain needs {least:,} bytes"), bound=search.bound,
                           others=search.others)
        peak = problem.simulate(outcome.schedule).peak
        return replace(outcome, bound=search.bound, smallest=min(least, peak), others=search.others,
                       first_seconds=search.first)

    def _smallest(self, problem: Problem) -> Candidate:
        """Return the schedule with the smallest peak that is known: of the chain, or of the program over the
        whole graph, asked for less and less. A pure function of the problem, except on a machine so slow that
        the clock ends a program."""
        settings = self._settings

        def make() -> Candidate:
            least = replace(smallest_of_chain(problem), note=_note("rk-rotor"))
            failed = save_set_program(problem).least_bytes - 1
            deep = len(problem.graph.c) > settings.deep_nodes
            near = max(1, int(least.peak * settings.deep_unused)) if deep else 1
            left = settings.smallest_seconds
            for _ in range(SMALLEST_TRIES):
                if left <= 0 or least.peak - failed <= near:
                    break
                middle = (failed + least.peak) // 2
                outcome, took = _asked(self.save_set, problem, middle, left / 4)
                left -= took
                if outcome.schedule is None:
                    failed = middle
                for found in found_in(problem, outcome):
                    if found.peak < least.peak:
                        least = replace(found, note=_note("save-set"))
            done = 0
            while not deep and done < SIMULATIONS:
                fitted = fit(problem, least.schedule, least.peak - 1)
                if fitted.candidate is None:
                    break
                least, done = replace(fitted.candidate, note=least.note), done + fitted.simulations
            return least

        return problem.once(("smallest", settings, self.save_set), make)


class _Search:
    """State of the search for one budget."""

    def __init__(self, problem: Problem, budget: int, time_limit: float) -> None:
        self.problem = problem
        self.budget = budget
        self.left = time_limit
        self.bound: float | None = None
        self.first: float | None = None
        """Seconds of the first schedule within the budget."""
        self.cut = False
        """Whether the strategy that gave the bound had used up its time."""
        self.pending: list[Candidate] = []
        self.found: list[Candidate] = []
        self._larger: list[Candidate] = []

    @property
    def others(self) -> tuple[Candidate, ...]:
        """All that other budgets may have use for: what was found, and what needs more than this budget."""
        return (*self.found, *self._larger)

    def ask(self, entry: Entry) -> None:
        """Ask a strategy, where its turn has come."""
        if entry.after_cut and not self.cut:
            return
        if entry.after_cut:
            self.finish(0.0)
        if entry.gap is not None and not self._above_bound(entry.gap):
            return
        start = time.perf_counter()
        outcome, _ = _asked(entry.strategy, self.problem, self.budget, entry.seconds, self.left,
                            math.inf if entry.gap is None else self._fastest / (1 + entry.gap))
        self.left = max(0.0, self.left - (time.perf_counter() - start))
        if outcome.bound is not None:
            self.bound = max(self.bound or 0.0, outcome.bound)
            self.cut = outcome.cut_short
        found = sorted(outcome.others, key=lambda c: c.seconds)[:entry.finished] if entry.finished > 1 else []
        self.pending += [replace(c, note=_note(entry.origin))
                         for c in found or taken_in(self.problem, outcome)]
        if self.first is None and outcome.schedule is not None:
            self.first = outcome.seconds
        self._larger += [replace(c, note=_note(entry.origin)) for c in outcome.others
                         if c.peak > self.budget]

    def finish(self, near: float) -> None:
        """Finish the pending schedules, except hopeless ones; only the fastest if it is near the bound."""
        pending = sorted(self.pending, key=lambda c: (c.seconds, c.peak))
        hopeful = [c for c in pending if c.seconds <= HOPELESS * pending[0].seconds]
        for c in hopeful if self._above_bound(near) else pending[:1]:
            done = finished(self.problem, c.schedule, self.budget)
            self.found.append(replace(c, schedule=done.schedule, peak=done.peak, seconds=done.seconds))
        self.pending.clear()

    def _above_bound(self, gap: float) -> bool:
        """Return whether nothing was found that is this near to the bound."""
        return self.bound is None or self._fastest > self.bound * (1 + gap)

    @property
    def _fastest(self) -> float:
        """Seconds of the fastest schedule that was found."""
        return min((c.seconds for c in (*self.pending, *self.found)), default=math.inf)


def _asked(strategy: Planner, problem: Problem, budget: int, seconds: float,
           left: float = math.inf, enough: float = math.inf) -> tuple[Outcome, float]:
    """Ask a strategy for at most `seconds`; returns its outcome, and the seconds that it took: as counted,
    where the strategy counts its work, otherwise of the clock. `left`: seconds of the clock in any case.
    `enough`: a bound that ends a search for one."""
    if isinstance(strategy, SaveSet) and not math.isinf(seconds):
        strategy, limit = replace(strategy, work=seconds, enough=enough), min(
            SLOWEST * seconds, left)
    else:
        limit = min(seconds, left)
    start = time.perf_counter()
    outcome = strategy.plan(problem, budget, time_limit=None if math.isinf(limit) else limit)
    return outcome, time.perf_counter() - start if outcome.worked is None else outcome.worked


def _note(origin: str) -> str:
    return f"the fastest of several schedules: that of {_WORDS[origin]}"
