"""Lower-set strategies as planners of a captured model.

Equation (2) is a plain graph's model of memory; a captured graph has saved values, temporaries and
gradients of its own. So the program is asked for strategies at several budgets of its model, and
the simulator says what each really needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.planners.canonical import canonical, without_liveness
from rkmate.planners.dag import forward_dag
from rkmate.planners.lower_sets import (
    Centric,
    Family,
    LowerSetProgram,
    TooManyLowerSets,
)
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, infeasible, judged

LEVELS = 12
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
        """See `rkmate.planners.protocol.Planner.plan`."""
        if not self.liveness and any(problem.graph.c[i].random for i in problem.graph.forward):
            # Without liveness only the paper's order of blocks makes sense, and it would draw
            # random numbers in another order.
            return infeasible("the forward would draw random numbers in another order")
        try:
            return best(problem.once(self.name, lambda: self._candidates(problem)), budget)
        except TooManyLowerSets as error:
            return infeasible(str(error))

    def _candidates(self, problem: Problem) -> list[Candidate]:
        graph = problem.graph
        dag = forward_dag(graph, problem.held)
        if not len(dag):
            return [judged(problem, range(len(graph.c)), 0)]
        program = LowerSetProgram(dag, self.family, time_steps=TIME_STEPS)
        low = program.minimum_bytes()
        high = 2 * dag.bytes((1 << len(dag)) - 1)    # one block for all: nothing needs more
        found = {}
        for k in range(LEVELS):
            solution = program.solve(low + (high - low) * k * k // (LEVELS - 1) ** 2, self.centric)
            if solution is not None:
                found[solution.sets] = f"{len(solution.sets)} lower sets"
        result = []
        for sets, note in found.items():
            for last in (True, False) if self.liveness else (False,):
                strategy = canonical(graph, dag, sets, keep_last=last,
                                     by_blocks=not self.liveness)
                if self.liveness:
                    result.append(judged(problem, strategy.order, strategy.loss_at, note))
                else:
                    schedule = without_liveness(graph, strategy, problem.held)
                    seen = problem.simulate(schedule)
                    result.append(Candidate(schedule, seen.peak, seen.seconds, note))
        return result
