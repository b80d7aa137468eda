"""HiGHS behind a small face: a program in, a status, values and a bound out.

The program, PuLP's or `Rows`, is handed over once; `solve` may be called again after bounds of a
variable changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pulp

from rkmate.errors import ArgumentError, SolverError
from rkmate.support.side_process import run_on_the_side

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


class Rows:
    """A program to minimize, as the arrays that HiGHS takes: for large ones, whose writing in PuLP takes
    as long as solving them."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}
        """By name."""
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integer: list[bool] = []
        self._start = [0]
        self._index: list[int] = []
        self._value: list[float] = []
        self._least: list[float] = []

    def column(self, name: str, lower: float, upper: float = math.inf, cost: float = 0.0, *,
               integer: bool = False) -> int:
        """A variable, by the number that rows name it by."""
        self.columns[name] = len(self._lower)
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._integer.append(integer)
        return len(self._lower) - 1

    def at_least(self, least: float, plus: Iterable[int], minus: Iterable[int] = ()) -> None:
        """The sum of some variables without the others: no less than a number."""
        for sign, columns in ((1.0, plus), (-1.0, minus)):
            for k in columns:
                self._index.append(k)
                self._value.append(sign)
        self._end_row(least)

    def weighted(self, least: float, terms: Iterable[tuple[int, float]]) -> None:
        """The weighted sum of some variables: no less than a number."""
        for k, weight in terms:
            self._index.append(k)
            self._value.append(weight)
        self._end_row(least)

    def _end_row(self, least: float) -> None:
        self._start.append(len(self._index))
        self._least.append(least)

    def handed_over(self, highs: Any) -> None:
        """Make this the program of a solver, its variables in the order of their names, as PuLP has them:
        which of several solutions is found, and how soon, depends on the order."""
        import highspy

        names = sorted(self.columns)
        old = np.array([self.columns[name] for name in names])
        place = np.empty(len(old), dtype=np.int32)
        place[old] = np.arange(len(old))
        self.columns = {name: k for k, name in enumerate(names)}
        kinds = highspy.HighsVarType
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(old), len(self._least)
        program.col_cost_ = np.array(self._cost)[old]
        program.col_lower_, program.col_upper_ = np.array(self._lower)[old], np.array(self._upper)[old]
        program.row_lower_ = np.array(self._least)
        program.row_upper_ = np.full(len(self._least), math.inf)
        program.integrality_ = [kinds.kInteger if self._integer[k] else kinds.kContinuous for k in old]
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_, matrix.index_ = np.array(self._start), place[self._index]
        matrix.value_ = np.array(self._value)
        if highs.passModel(program) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS does not take the program")


class Highs:
    """A program inside HiGHS."""

    def __init__(self, program: pulp.LpProblem | Rows) -> None:
        adapter = pulp.HiGHS(msg=False, threads=1)
        if not adapter.available():
            raise ArgumentError("HiGHS cannot be imported; install highspy")
        if isinstance(program, Rows):
            empty = pulp.LpProblem()
            adapter.createAndConfigureSolver(empty)
            self._highs: Any = empty.solverModel
            program.handed_over(self._highs)
            self._index = program.columns
        else:
            adapter.createAndConfigureSolver(program)
            adapter.buildSolverModel(program)
            self._highs = program.solverModel
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
