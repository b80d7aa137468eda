"""Checkmate's linear relaxation, rounded (Jain et al., MLSys 2020, section 5: two-phase rounding).

Phase one rounds S, which values stay from stage to stage, at thresholds. Phase two finds the fewest
runs R that make it executable. A rounded schedule may need more memory than its relaxation had, so
relaxations at several budgets are rounded and the simulator picks what fits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rkmate.ilp.highs import Status
from rkmate.ir.recompute import missing_nodes
from rkmate.planners.checkmate import (
    MOST_DECISIONS,
    TIME_LIMIT,
    Checkmate,
    program_of,
    recompute_of,
)
from rkmate.planners.checkmate_model import CheckmateModel, rerunnable
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, judged, whole_step

THRESHOLDS = (0.5, 0.25, 0.75, 0.05, 0.95)
BUDGETS = (0.95, 0.85, 0.7, 0.62, 0.55, 0.45, 0.37, 0.3, 0.2, 0.14)
"""Budgets of the relaxations, as fractions of the peak without recomputation."""


def round_relaxation(model: CheckmateModel, values: Mapping[str, float],
                     threshold: float) -> tuple[list[int], int]:
    """The order of C nodes that keeps what the relaxation keeps to at least `threshold`."""
    graph = model.graph
    n = len(graph.c)
    stay = [{j for j, v in stage.items() if values.get(v.name, 0.0) >= threshold}
            for stage in model.S] + [set()]
    there: set[int] = set()
    order: list[int] = []
    loss_at = n
    for t in range(n):
        if t == graph.loss:
            order += sorted(missing_nodes(graph, graph.outputs, there | model.pinned))
            there |= {j for i in order for j in graph.c[i].outputs if j in graph.outputs}
            loss_at = len(order)
        node = graph.c[t]
        made_here = set(node.outputs)
        wanted = (*node.inputs, *sorted(stay[t + 1] - made_here))
        before = sorted(missing_nodes(graph, wanted, there | model.pinned, {t}))
        made = {j for i in before for j in graph.c[i].outputs} | made_here
        order += [*before, t]
        there = {j for j in there | made if j in stay[t + 1]}
    return order, loss_at if graph.loss < n else len(order)


@dataclass
class Roundings:
    """Relaxations that were solved: each is the problem's alone."""

    found: dict[float, tuple[Candidate, ...]] = field(default_factory=dict)
    """By their part of the whole step's peak, the schedules that they were rounded to."""
    infeasible: float = 0.0
    """The largest part that is known to have no solution."""
    given_up: float = 0.0
    """The longest time, in seconds, in which not even one could be solved."""


@dataclass(frozen=True)
class CheckmateRounded:
    """Roundings of relaxations at a fixed set of budgets; the fastest that fits is taken.

    Where the time is over before all of them are solved, the next call goes on with the others. The
    one nearest to the budget comes first.
    """

    name: str = "checkmate-lp"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`. No bound is known: the relaxations are of
        other budgets."""
        graph = problem.graph
        limit = TIME_LIMIT if time_limit is None else time_limit
        whole = replace(whole_step(problem), note="nothing recomputed")
        if whole.peak <= budget:
            return best((whole,), budget)
        state = problem.once(self.name, Roundings)
        decisions = problem.once("decisions", lambda: sum(map(len, rerunnable(
            graph, recompute_of(graph)))))
        if decisions > MOST_DECISIONS:
            return Outcome(None, "timeout", float("inf"), note=(
                f"not tried: {decisions:,} possible recomputations; the relaxation takes up to "
                f"{MOST_DECISIONS:,}"))
        self._solve(problem, state, budget, limit)
        left = sum(part > state.infeasible and part not in state.found for part in BUDGETS)
        note = f"{left} of {len(BUDGETS)} relaxations not solved in {limit:g} s" if left else ""
        outcome = best((c for found in state.found.values() for c in found), budget, note)
        if outcome.schedule is None and left:
            return Outcome(None, "timeout", float("inf"), note=note)
        return outcome

    def _solve(self, problem: Problem, state: Roundings, budget: int, limit: float) -> None:
        """Solve and round what is still to be done, until the time is over."""
        start = time.perf_counter()
        if limit <= state.given_up:
            return                       # they are all of one size: another one will not do better
        program: Checkmate = program_of(problem)
        top = whole_step(problem).peak
        before = len(state.found), state.infeasible
        for part in sorted(BUDGETS, key=lambda p: abs(p * top - budget)):
            left = limit - (time.perf_counter() - start)
            if left <= 0:
                return
            if part in state.found or part <= state.infeasible:
                continue
            answer = program.relaxed(int(top * part), time_limit=left)
            if answer.status is Status.INFEASIBLE:
                state.infeasible = part
                continue
            if not answer.values:
                if (len(state.found), state.infeasible) == before:
                    state.given_up = limit
                return
            state.found[part] = tuple(
                judged(problem, *round_relaxation(program.model, answer.values, threshold),
                       f"relaxation at {part:.0%}, rounded at {threshold}")
                for threshold in THRESHOLDS)
