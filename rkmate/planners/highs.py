"""HiGHS behind a small face: a PuLP program in, a status, values and a bound out.

The program is handed over once; `solve` may be called again after bounds of a variable changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pulp

from rkmate.errors import ArgumentError, SolverError
from rkmate.ilp.side import run_on_the_side

Status = Literal["optimal", "feasible", "infeasible", "timeout"]


@dataclass(frozen=True)
class Answer:
    """How a solve ended."""

    status: Status
    """``feasible``: a solution, not proven within the gap when the time was over. ``timeout``: no
    solution, and no proof that there is none."""
    bound: float
    """No solution has a smaller objective; -inf when nothing is known."""
    objective: float = float("inf")
    values: dict[str, float] = field(default_factory=dict)
    """By variable name; empty without a solution."""


class Highs:
    """A program inside HiGHS."""

    def __init__(self, program: pulp.LpProblem) -> None:
        adapter = pulp.HiGHS(msg=False, threads=1)
        if not adapter.available():
            raise ArgumentError("HiGHS cannot be imported; install highspy")
        adapter.createAndConfigureSolver(program)
        adapter.buildSolverModel(program)
        self._highs: Any = program.solverModel
        self._index = {v.name: v.index for v in program.variables()}

    def fix(self, name: str, value: float) -> None:
        """Set both bounds of a variable."""
        if name in self._index:
            self._highs.changeColBounds(self._index[name], value, value)

    def solve(self, time_limit: float, *, gap: float = 0.0, relax: bool = False,
              start: Mapping[str, float] | None = None, nodes: int | None = None) -> Answer:
        """Minimize. `time_limit` in seconds, `gap` relative; `relax`: forget integrality; `start`:
        values of the integer variables of a known solution; `nodes`: of branch and bound, at
        most."""
        import highspy

        highs = self._highs
        highs.clearSolver()
        # The limit of a linear program counts from the first run on, an integer one's does not.
        spent = highs.getRunTime() if relax else 0.0
        highs.setOptionValue("time_limit", spent + max(0.01, float(time_limit)))
        highs.setOptionValue("mip_rel_gap", gap)
        if nodes is not None:
            highs.setOptionValue("mip_max_nodes", nodes)
        highs.setOptionValue("solve_relaxation", relax)
        highs.setOptionValue("solver", "ipm" if relax else "choose")
        if start:
            known_values = [(self._index[k], v) for k, v in start.items() if k in self._index]
            highs.setSolution(len(known_values),
                              np.array([i for i, _ in known_values], dtype=np.int32),
                              np.array([v for _, v in known_values], dtype=np.float64))
        known = highspy.HighsModelStatus
        run_on_the_side(highs.run, highs.cancelSolve)
        if relax and highs.getModelStatus() == known.kSolveError:
            highs.clearSolver()          # the interior point method broke down; simplex is slower
            highs.setOptionValue("solver", "simplex")
            run_on_the_side(highs.run, highs.cancelSolve)
        status = highs.getModelStatus()
        info = highs.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if status == known.kModelEmpty:
            return Answer("optimal", 0.0, 0.0)
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):
            return Answer("infeasible", float("inf"))    # all variables are bounded
        done = status == known.kOptimal
        limits = (known.kTimeLimit, known.kSolutionLimit, known.kInterrupt, known.kIterationLimit)
        if not done and status not in limits:
            raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)}")
        objective = info.objective_function_value
        bound = (objective if done else float("-inf")) if relax else info.mip_dual_bound
        if not found:
            return Answer("timeout", bound)
        column = highs.getSolution().col_value
        return Answer("optimal" if done else "feasible", bound, objective,
                      {name: column[i] for name, i in self._index.items()})
