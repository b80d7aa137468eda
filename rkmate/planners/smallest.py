"""The smallest budget that a planner meets, to be named where a budget is too small."""

from __future__ import annotations

import time

from rkmate.planners.protocol import Composed, Planner, Problem, whole_step

SECONDS = 4.0
"""How long a planner may be asked for smaller and smaller budgets: an error should not take minutes."""
TRIES = 24
"""How often the range is halved, at most."""


def smallest_budget(planner: Planner, problem: Problem, above: int, *,
                    seconds: float = SECONDS) -> int | None:
    """The smallest budget, in bytes, that a planner is known to meet; None where it has no schedule at all.

    By bisection on what it returns, unless it knows. `above`: a budget that it does not meet. Each try has
    a quarter of the time that is left: what answers at once is asked `TRIES` times, what takes long less
    and less thoroughly.
    """
    if isinstance(planner, Composed):
        return planner.smallest_budget(problem, above)
    until = time.perf_counter() + seconds
    best: int | None = None
    low, high = above, 2 * max(above, whole_step(problem).peak)
    for _ in range(TRIES):
        left = until - time.perf_counter()
        if left <= 0:
            break
        middle = high if best is None else (low + high) // 2
        outcome = planner.plan(problem, middle, time_limit=left / 4)
        if outcome.schedule is not None:
            best = high = problem.simulate(outcome.schedule).peak
        elif best is None:
            return None
        else:
            low = middle
        if high - low <= 1:
            break
    return best
