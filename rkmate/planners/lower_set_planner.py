"""Lower-set strategies as planners of a captured model.

Equation (2) is a plain graph's model of memory; a captured graph has saved values, temporaries and
gradients of its own. So the program is asked for strategies at several budgets of its model, and
the simulator says what each really needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.ir.cd import CDGraph
from rkmate.planners.canonical import Canonical, canonical, without_liveness
from rkmate.planners.dag import trained_forward
from rkmate.planners.lower_sets import (
    TIME_LIMIT,
    Centric,
    Family,
    LowerSetProgram,
    TooManyLowerSets,
)
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, infeasible, judged

STRATEGY_BUDGETS = 12
"""Budgets of equation (2) that strategies are made for."""
TIME_STEPS = 500
"""Steps of T(V) in which measured times are counted."""


@dataclass(frozen=True)
class LowerSetPlanner:
    """One family, time-centric or memory-centric (section 4.4), with or without liveness."""

    name: str
    family: Family = "pruned"
    centric: Centric = "time"
    liveness: bool = True

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`. `time_limit`: the exact family refuses graphs
        for which it would take longer."""
        try:
            limit = TIME_LIMIT if time_limit is None else time_limit
            candidates = problem.once(self.name, lambda: self._candidates(problem, limit))
        except TooManyLowerSets as error:
            return infeasible(str(error))
        if not candidates:
            return infeasible("block after block, the forward would draw random numbers in another "
                              "order")
        return best(candidates, budget)

    def _candidates(self, problem: Problem, time_limit: float) -> list[Candidate]:
        graph = problem.graph
        forward = trained_forward(graph, problem.block_c, problem.pinned)
        dag = forward.dag
        if not len(dag):
            return [judged(problem, range(len(graph.c)), graph.loss)]
        program = LowerSetProgram(dag, self.family, time_limit=time_limit, budgets=STRATEGY_BUDGETS,
                                  time_steps=TIME_STEPS)
        low = program.minimum_bytes()
        high = 2 * dag.bytes((1 << len(dag)) - 1)    # one block for all: nothing needs more
        found: dict[tuple[int, ...], str] = {((1 << len(dag)) - 1,): "1 lower set"}
        for k in range(STRATEGY_BUDGETS):
            solution = program.solve(low + (high - low) * k * k // (STRATEGY_BUDGETS - 1) ** 2, self.centric)
            if solution is not None:
                found[solution.sets] = f"{len(solution.sets)} lower sets"
        result = []
        for sets, note in found.items():
            for last in (True, False):
                strategy = canonical(graph, forward.whole, forward.lift(sets), keep_last=last,
                                     by_blocks=not self.liveness)
                if self.liveness:
                    result.append(judged(problem, strategy.order, strategy.loss_at, note))
                elif _draws_in_order(graph, strategy):
                    schedule = without_liveness(graph, strategy, problem.pinned)
                    seen = problem.simulate(schedule)
                    result.append(Candidate(schedule, seen.peak, seen.seconds, note))
        return result


def _draws_in_order(graph: CDGraph, strategy: Canonical) -> bool:
    """Whether the first runs of random operations come as in the graph.

    Without liveness only the paper's order makes sense, block after block; a reordered forward
    would give other random numbers to each operation.
    """
    first = dict.fromkeys(c for c in strategy.order if graph.c[c].random)
    return list(first) == sorted(first)
