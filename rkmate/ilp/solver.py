"""Solvers of a block's program behind one face: two budgets in, a `Solution` out.

HiGHS is driven through `rkmate.ilp.highs`: the program is handed over once and only the bounds of
the two budget variables change. Any other PuLP solver is called through PuLP.
"""

from __future__ import annotations

import threading
from typing import Protocol

import pulp

from rkmate.errors import ArgumentError, SolverError
from rkmate.ilp.highs import Highs, Solution, Status
from rkmate.ilp.model import TIME_SCALE, BlockModel


class Solver(Protocol):
    """Solves one `BlockModel` for any pair of budgets."""

    def solve(self, m_peak: int, m_save: int, *, time_limit: float, gap: float,
              start: dict[str, float] | None = None) -> Solution:
        """Budgets in units of the model, the limit in seconds, the gap in fractions of the
        block's own time. `start`: values of some variables of a known solution."""


def make_solver(name: str, model: BlockModel, stop: threading.Event | None = None) -> Solver:
    """A solver by its PuLP name. Raises `ArgumentError` when it is unknown or not installed.

    `stop`: ends a solve early when somebody sets it, as if its time were over; only HiGHS looks at
    it while it runs.
    """
    if name == "HiGHS":
        return HighsSolver(model, stop)
    available = pulp.listSolvers(onlyAvailable=True)
    if name not in available:
        raise ArgumentError(
            f"solver is {name!r}; it should be one that PuLP finds here: {', '.join(available)}")
    return PulpSolver(name, model)


class HighsSolver:
    """HiGHS, through its own interface."""

    def __init__(self, model: BlockModel, stop: threading.Event | None = None) -> None:
        self._model = model
        self._highs = Highs(model.problem, stop)

    def solve(self, m_peak: int, m_save: int, *, time_limit: float, gap: float,
              start: dict[str, float] | None = None) -> Solution:
        """See `Solver.solve`. Raises `SolverError` when HiGHS itself fails."""
        # A block with no constraint on memory does not have these variables.
        self._highs.fix(self._model.m_peak.name, float(m_peak))
        self._highs.fix(self._model.m_save.name, float(m_save))
        return self._highs.solve(time_limit, absolute_gap=max(gap * TIME_SCALE, 1e-6), start=start)


class PulpSolver:
    """Any solver that PuLP can drive."""

    def __init__(self, name: str, model: BlockModel) -> None:
        self._name = name
        self._model = model

    def solve(self, m_peak: int, m_save: int, *, time_limit: float, gap: float,
              start: dict[str, float] | None = None) -> Solution:
        """See `Solver.solve`; `start` is not used. Raises `SolverError` when the solver fails."""
        model = self._model
        for variable, value in ((model.m_peak, m_peak), (model.m_save, m_save)):
            variable.bounds(value, value)
        # The relative gap of these solvers is that of the recomputations alone: stricter than
        # asked, never looser.
        solver = pulp.getSolver(self._name, msg=False, timeLimit=time_limit, gapRel=gap)
        try:
            model.problem.solve(solver)
        except pulp.PulpSolverError as error:
            raise SolverError(f"{self._name}: {error}") from error
        problem = model.problem
        if problem.status == pulp.LpStatusInfeasible:
            return Solution(Status.INFEASIBLE)
        if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = {v.name: v.varValue or 0.0 for v in problem.variables()}
            if problem.sol_status == pulp.LpSolutionOptimal:
                objective = pulp.value(problem.objective) or 0.0
                return Solution(Status.OPTIMAL, values, objective * (1 - gap))
            return Solution(Status.FEASIBLE, values)
        if problem.status == pulp.LpStatusNotSolved:
            return Solution(Status.TIMED_OUT)
        raise SolverError(f"{self._name} ended with {pulp.LpStatus[problem.status]}")
