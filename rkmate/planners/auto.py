"""Find the best plan of several planners within a limit on planning time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner, Problem, ask, infeasible
from rkmate.planners.settings import PlannerSettings

TIME_LIMIT = 30.0
"""Seconds of planning, where the caller names no limit."""


@dataclass(frozen=True)
class Turn:
    """A planner, and when it is asked."""

    planner: Planner
    always: bool = False
    """Whether the planner is asked even if no time is left."""


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
    def turns(self) -> tuple[Turn, ...]:
        """All planners in order."""
        return (*map(Turn, self.before), Turn(self.default, always=True), *map(Turn, self.after))

    @property
    def asks(self) -> tuple[str, ...]:
        """See `rkmate.planners.protocol.Composed`."""
        return tuple(turn.planner.name for turn in self.turns)

    def with_settings(self, settings: PlannerSettings) -> Auto:
        """Return a copy of the planner whose default planner has other settings."""
        configured = getattr(self.default, "with_settings", None)
        return self if configured is None else replace(self, default=configured(settings))

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`. The bound is the default's."""
        return self._plan(problem, budget, time_limit, None)

    def further(self, problem: Problem, budget: int, *, time_limit: float | None = None,
                known: Sequence[Candidate] = ()) -> Outcome:
        """See `rkmate.planners.protocol.Composed`."""
        return self._plan(problem, budget, time_limit, known)

    def smallest_budget(self, problem: Problem, above: int) -> int:
        """See `rkmate.planners.protocol.Composed`."""
        return self.default.smallest_budget(problem, above)

    def _plan(self, problem: Problem, budget: int, time_limit: float | None,
              known: Sequence[Candidate] | None) -> Outcome:
        limit = TIME_LIMIT if time_limit is None else time_limit
        start = time.perf_counter()
        least = bound = sum(c.time for c in problem.graph.c)
        tried: list[tuple[str, Outcome]] = []
        skipped: list[str] = []
        for turn in self.turns:
            planner = turn.planner
            left = max(0.0, limit - (time.perf_counter() - start))
            if not left and not turn.always:
                skipped.append(planner.name)
                continue
            outcome = ask(planner, problem, budget, time_limit=left, known=known if turn.always else None)
            tried.append((planner.name, outcome))
            if turn.always and outcome.bound is not None:
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
