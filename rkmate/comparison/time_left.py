"""How long a row of tasks will still take, from those that are done."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean


def seconds_left(done: Sequence[tuple[str, float]], coming: Sequence[str]) -> float | None:
    """Seconds of the tasks that come: each as long as its method's mean so far, or the mean of all where its
    method has not run. None while nothing is done.

    `done`: (method, seconds). A planner takes about as long for one budget as for the next, and planners
    differ by three orders of magnitude: one rate for all of them would say nothing.
    """
    if not done:
        return None
    every = mean(seconds for _, seconds in done)
    own: dict[str, list[float]] = {}
    for method, seconds in done:
        own.setdefault(method, []).append(seconds)
    return sum(mean(own[m]) if m in own else every for m in coming)
