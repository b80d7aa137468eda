"""The best plan of several planners within a limit on planning time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.planners.protocol import Outcome, Planner, Problem, infeasible

TIME_LIMIT = 30.0
"""Seconds of planning, where the caller names no limit."""


@dataclass(frozen=True)
class Auto:
    """Asks planners in order, until the time is over; says which plan it took, and why."""

    planners: Sequence[Planner]
    name: str = "auto"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`. The bound is the greatest that is known to
        hold for all planners: the time without recomputation."""
        limit = TIME_LIMIT if time_limit is None else time_limit
        start = time.perf_counter()
        least = sum(c.time for c in problem.graph.c)
        tried: list[tuple[str, Outcome]] = []
        skipped: list[str] = []
        for planner in self.planners:
            left = limit - (time.perf_counter() - start)
            if left <= 0:
                skipped.append(planner.name)
                continue
            outcome = planner.plan(problem, budget, time_limit=left)
            tried.append((planner.name, outcome))
            if outcome.seconds <= least * (1 + 1e-12):
                break       # nothing is recomputed: no planner can do better
        found = [(outcome.seconds, k) for k, (_, outcome) in enumerate(tried)
                 if outcome.schedule is not None]
        late = f"; no time for {', '.join(skipped)}" if skipped else ""
        if not found:
            asked = f"none of {', '.join(n for n, _ in tried)} fits" if tried else "none was asked"
            outcome = infeasible(f"{asked}{late}")
            timed_out = skipped or any(o.status == "timeout" for _, o in tried)
            return replace(outcome, status="timeout") if timed_out else outcome
        _, k = min(found)
        name, winner = tried[k]
        others = [f"{other} {_ratio(outcome, least)}" for other, outcome in tried if other != name]
        against = f", against {', '.join(others)}" if others else ""
        return replace(winner, bound=least,
                       note=f"{name}: {_ratio(winner, least)} of the time without "
                            f"recomputation{against}{late}")


def _ratio(outcome: Outcome, least: float) -> str:
    if not math.isfinite(outcome.seconds):
        return outcome.status
    return f"{outcome.seconds / least:.3f}" if least else "1.000"
