"""Solvers behind one face: a built program, two budgets in, an `Answer` out.

HiGHS is driven through its Python interface: the program is handed over once and only the bounds
of the two budget variables change. Any other PuLP solver is called through PuLP. The words and
status codes of a solver stay in this file.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import pulp

from rkmate.errors import ArgumentError, SolverError
from rkmate.ilp.model import TIME_SCALE, BlockModel
from rkmate.support.side_process import run_on_the_side


class Status(Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """A solution, proven within the gap."""
    FEASIBLE = "feasible"
    """A solution; the time was over before it was proven."""
    INFEASIBLE = "infeasible"
    """Proven: there is no solution."""
    TIMED_OUT = "timed out"
    """The time was over before any solution was found; nothing is proven."""


@dataclass(frozen=True)
class Answer:
    """What a solver says."""

    status: Status
    values: dict[str, float] = field(default_factory=dict)
    """Value of each variable by name; empty without a solution."""
    bound: float = float("-inf")
    """No solution has a smaller objective (units of the model's objective)."""


class Solver(Protocol):
    """Solves one `BlockModel` for any pair of budgets."""

    def solve(self, m_peak: int, m_save: int, *, time_limit: float, gap: float,
              start: dict[str, float] | None = None) -> Answer:
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
    """HiGHS through highspy. One thread, so that blocks can be solved side by side."""

    def __init__(self, model: BlockModel, stop: threading.Event | None = None) -> None:
        adapter = pulp.HiGHS(msg=False, threads=1)
        if not adapter.available():
            raise ArgumentError(
                "solver is 'HiGHS', but highspy cannot be imported; install highspy")
        adapter.createAndConfigureSolver(model.problem)
        adapter.buildSolverModel(model.problem)
        self._highs: Any = model.problem.solverModel
        self._index: dict[str, int] = {v.name: v.index for v in model.problem.variables()}
        self._model = model
        self._stop = stop or threading.Event()
        self._highs.cbMipInterrupt.subscribe(self._interrupt)

    def _interrupt(self, event: Any) -> None:
        if self._stop.is_set():
            event.interrupt()

    def solve(self, m_peak: int, m_save: int, *, time_limit: float, gap: float,
              start: dict[str, float] | None = None) -> Answer:
        """See `Solver.solve`. Raises `SolverError` when HiGHS itself fails."""
        import highspy

        highs = self._highs
        for variable, value in ((self._model.m_peak, m_peak), (self._model.m_save, m_save)):
            column = self._index.get(variable.name)
            if column is not None:   # a block with no constraint on memory does not have it
                highs.changeColBounds(column, float(value), float(value))
        highs.clearSolver()
        highs.setOptionValue("time_limit", float(time_limit))
        highs.setOptionValue("mip_rel_gap", 0.0)
        highs.setOptionValue("mip_abs_gap", max(gap * TIME_SCALE, 1e-6))
        if start:
            self._start_from(start)
        run_on_the_side(highs.run, self._stop.set)
        status = highs.getModelStatus()
        known = highspy.HighsModelStatus
        info = highs.getInfo()
        has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if status == known.kModelEmpty:
            return Answer(Status.OPTIMAL, {}, 0.0)
        if status == known.kOptimal:
            return Answer(Status.OPTIMAL, self._values(), info.mip_dual_bound)
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):
            # All variables are bounded, so it can only be infeasible.
            return Answer(Status.INFEASIBLE)
        if status in (known.kTimeLimit, known.kSolutionLimit, known.kInterrupt,
                      known.kIterationLimit):
            if has_solution:
                return Answer(Status.FEASIBLE, self._values(), info.mip_dual_bound)
            return Answer(Status.TIMED_OUT, bound=info.mip_dual_bound)
        raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)}")

    def _start_from(self, start: dict[str, float]) -> None:
        import numpy as np

        columns = [(self._index[n], v) for n, v in start.items() if n in self._index]
        index = np.array([c for c, _ in columns], dtype=np.int32)
        value = np.array([v for _, v in columns], dtype=np.float64)
        self._highs.setSolution(len(columns), index, value)

    def _values(self) -> dict[str, float]:
        column = self._highs.getSolution().col_value
        return {name: column[i] for name, i in self._index.items()}


class PulpSolver:
    """Any solver that PuLP can drive."""

    def __init__(self, name: str, model: BlockModel) -> None:
        self._name = name
        self._model = model

    def solve(self, m_peak: int, m_save: int, *, time_limit: float, gap: float,
              start: dict[str, float] | None = None) -> Answer:
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
            return Answer(Status.INFEASIBLE)
        if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = {v.name: v.varValue or 0.0 for v in problem.variables()}
            if problem.sol_status == pulp.LpSolutionOptimal:
                objective = pulp.value(problem.objective) or 0.0
                return Answer(Status.OPTIMAL, values, objective * (1 - gap))
            return Answer(Status.FEASIBLE, values)
        if problem.status == pulp.LpStatusNotSolved:
            return Answer(Status.TIMED_OUT)
        raise SolverError(f"{self._name} ended with {pulp.LpStatus[problem.status]}")
