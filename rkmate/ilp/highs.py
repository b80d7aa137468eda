"""Integer programs: their rows, as arrays, and HiGHS, which solves them."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from rkmate.errors import SolverError
from rkmate.support.processes import run_on_the_side

# -- An integer program to minimize, as the arrays that HiGHS takes --------------------------------

Term = tuple[int, float]
"""A variable, by its number, and its weight."""


class Rows:
    """A program to minimize: variables with bounds and costs, and rows that bound weighted sums of them.

    Arrays, because writing a large program as expressions takes as long as solving it.
    """

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}
        """Columns by name."""
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integer: list[bool] = []
        self._start = [0]
        self._index: list[int] = []
        self._value: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def column(self, name: str, lower: float, upper: float = math.inf, cost: float = 0.0, *,
               integer: bool = False) -> int:
        """Return a variable, by the number that rows name it by."""
        self.columns[name] = len(self._lower)
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._integer.append(integer)
        return len(self._lower) - 1

    def at_least(self, least: float, plus: Iterable[int], minus: Iterable[int] = ()) -> None:
        """Add a row: the sum of some variables minus the sum of others is at least `least`."""
        for sign, columns in ((1.0, plus), (-1.0, minus)):
            for k in columns:
                self._index.append(k)
                self._value.append(sign)
        self._end_row(least)

    def weighted(self, least: float, terms: Iterable[Term], most: float = math.inf) -> None:
        """Bound the weighted sum of some variables, each named once: no less than `least`, no more than
        `most`."""
        for k, weight in terms:
            if weight:
                self._index.append(k)
                self._value.append(weight)
        self._end_row(least, most)

    def _end_row(self, least: float, most: float = math.inf) -> None:
        self._start.append(len(self._index))
        self._least.append(least)
        self._most.append(most)

    @property
    def entries(self) -> int:
        """Number of entries of the matrix."""
        return len(self._index)

    def handed_over(self, highs: Any) -> None:
        """Make this the program of a solver, its variables in the order of their names: which of several
        solutions is found, and how soon, depends on the order."""
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
        program.row_upper_ = np.array(self._most)
        program.integrality_ = [kinds.kInteger if self._integer[k] else kinds.kContinuous for k in old]
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_, matrix.index_ = np.array(self._start), place[self._index]
        matrix.value_ = np.array(self._value)
        if highs.passModel(program) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS rejects the program")


# -- HiGHS behind a small face: a program in, a status, values and a bound out ---------------------

class Status(Enum):
    """Result of a solve."""

    OPTIMAL = "optimal"
    """A solution, proven within the gap."""
    FEASIBLE = "feasible"
    """A solution; the time was over before it was proven."""
    INFEASIBLE = "infeasible"
    """Proven: there is no solution."""
    TIMED_OUT = "timed out"
    """The time was over before any solution was found; nothing is proven."""


_ENDS = {
    "kModelEmpty": Status.OPTIMAL,
    "kOptimal": Status.OPTIMAL,
    "kInfeasible": Status.INFEASIBLE,
    # All variables are bounded, so it can only be infeasible.
    "kUnboundedOrInfeasible": Status.INFEASIBLE,
    "kTimeLimit": Status.TIMED_OUT,
    "kSolutionLimit": Status.TIMED_OUT,
    "kIterationLimit": Status.TIMED_OUT,
    "kInterrupt": Status.TIMED_OUT,
}
"""Statuses by the name of HiGHS's model status; all others are failures."""
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Solution:
    """Result of a solver."""

    status: Status
    values: dict[str, float] = field(default_factory=dict)
    """Value of each variable by name; empty without a solution."""
    bound: float = float("-inf")
    """No solution has a smaller objective (units of the program's objective)."""
    objective: float = float("inf")


def status_of(name: str, *, found: bool) -> Status:
    """Return the status for HiGHS's name of one; `found`: there is a solution. Raises `SolverError`."""
    status = _ENDS.get(name)
    if status is None:
        raise SolverError(f"HiGHS ended with {name}")
    return Status.FEASIBLE if status is Status.TIMED_OUT and found else status


_greeting = threading.Lock()
_greeted = False
"""Whether HiGHS has been made in this process."""


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Drop what the first solver of a process writes to standard output when it is made: from 1.16 on, HiGHS
    names its version and its licence there, before any option can be set. Programs read JSON from there."""
    global _greeted
    with _greeting:
        if _greeted or sys.platform == "win32":
            yield
            return
        _greeted = True
        flush = ctypes.CDLL(None).fflush            # what C has buffered
        try:
            flush(None)
            before = os.dup(1)
        except OSError:                             # there is no standard output
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            yield
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            os.close(nowhere)


CHECK_SECONDS = 1e-5, 0.83
"""Seconds that the solver's work between two of its checks of limits counts for, before the first node is
branched on: a factor, and the power of the number of the program's entries that it multiplies. A core of an
ordinary processor takes about as long (1 to 60 ms for 400 to 30,000 entries)."""
LATER = 0.2
"""The share of that for checks after the first node."""


@dataclass
class Work:
    """The work of solves, counted in seconds that are equal on every machine. An integer program checks its
    limits at the same points on every machine."""

    limit: float = math.inf
    spent: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.spent >= self.limit

    def check(self, entries: int, nodes: int) -> bool:
        """Count the work until a check of a program with so many entries, after so many nodes of branch and
        bound; returns whether the limit is reached."""
        self.spent += (LATER if nodes else 1.0) * CHECK_SECONDS[0] * entries ** CHECK_SECONDS[1]
        return self.is_over


_LEFT_OUT = ("feasibility_jump", "rins", "rens")
"""Heuristics of the solver that cost more than they find. The first looks for a first solution, which most
programs are given. The others solve a smaller program for a better solution, at work that no check of limits
sees: half of a search's time for schedules that were the same."""


class Highs:
    """A program inside HiGHS, on one thread, so that several can be solved side by side."""

    def __init__(self, program: Rows, stop: threading.Event | None = None, *, restarts: bool = True) -> None:
        """Pass a program to the solver. `stop`: set it to end a solve early, as if its time were over.
        `restarts`: whether a program may be presolved and cut again at its root."""
        import highspy

        with _without_greeting():
            self._highs: Any = highspy.Highs()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        for heuristic in _LEFT_OUT:
            self._highs.setOptionValue(f"mip_heuristic_run_{heuristic}", False)
        self._highs.setOptionValue("mip_allow_restart", restarts)
        program.handed_over(self._highs)
        self._index = program.columns
        self._stop = stop
        self._interrupted = False
        self._work: Work | None = None
        self._enough = math.inf
        self._entries = program.entries
        self._highs.cbMipInterrupt.subscribe(self._may_stop)
        self._relaxed = False
        self.iterations = 0
        """Iterations of the simplex method so far: a measure of work that is the same on every machine."""

    def fix(self, name: str, value: float) -> None:
        """Set both bounds of a variable. A name that the program does not have is ignored."""
        if name in self._index:
            self._highs.changeColBounds(self._index[name], value, value)

    def solve(self, time_limit: float, *, gap: float = 0.0, absolute_gap: float = 1e-6,
              relax: bool = False, start: Mapping[str, float] | None = None,
              nodes: int | None = None, work: Work | None = None, enough: float = math.inf) -> Solution:
        """Minimize. Raises `SolverError` when HiGHS itself fails.

        `time_limit` in seconds. `gap`: relative to the objective, `absolute_gap`: in its units; within
        either of them a solution is optimal. `relax`: leave integrality out. `start`: values of some
        variables of a known solution. `nodes`: of branch and bound, at most. `work`: is counted on, and
        ends an integer program at its limit; so does a bound of `enough`. An interrupt stops HiGHS first and
        is raised then.
        """
        highs = self._highs
        highs.clearSolver()
        self._work, self._enough = work, enough
        # The limit of a linear program counts from the first run on, an integer one's does not.
        spent = highs.getRunTime() if relax else 0.0
        highs.setOptionValue("time_limit", spent + max(0.0, float(time_limit)))
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("mip_abs_gap", absolute_gap)
        highs.setOptionValue("mip_max_nodes", _NO_LIMIT if nodes is None else nodes)
        highs.setOptionValue("solve_relaxation", relax)
        highs.setOptionValue("solver", "ipm" if relax else "choose")
        if start:
            self._start_from(start)
        if relax and not self._relaxed:
            self._relaxed = True
            highs.cbIpmInterrupt.subscribe(self._may_stop)
            highs.cbSimplexInterrupt.subscribe(self._may_stop)
        self._run()
        if relax and highs.getModelStatus().name == "kSolveError":
            highs.clearSolver()          # the interior point method broke down; simplex is slower
            highs.setOptionValue("solver", "simplex")
            self._run()
        return self._solution(relax=relax)

    def _solution(self, *, relax: bool) -> Solution:
        import highspy

        info = self._highs.getInfo()
        self.iterations += max(0, info.simplex_iteration_count)
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        name = self._highs.getModelStatus().name
        status = status_of(name, found=found)
        if name == "kModelEmpty":
            return Solution(status, {}, 0.0, 0.0)
        if status is Status.INFEASIBLE:
            return Solution(status, {}, float("inf"))
        objective = info.objective_function_value
        bound = info.mip_dual_bound
        if relax:
            bound = objective if status is Status.OPTIMAL else float("-inf")
        if not found:
            return Solution(status, {}, bound)
        column = self._highs.getSolution().col_value
        return Solution(status, {n: column[i] for n, i in self._index.items()}, bound, objective)

    def _start_from(self, start: Mapping[str, float]) -> None:
        known = [(self._index[k], v) for k, v in start.items() if k in self._index]
        self._highs.setSolution(len(known), np.array([i for i, _ in known], dtype=np.int32),
                                np.array([v for _, v in known], dtype=np.float64))

    def _run(self) -> None:
        self._interrupted = False
        run_on_the_side(self._highs.run, self._interrupt)

    def _interrupt(self) -> None:
        self._interrupted = True

    def _may_stop(self, event: Any) -> None:
        # Said each time: the solver remembers an interrupt of the solve before.
        event.interrupt(self._interrupted or (self._stop is not None and self._stop.is_set())
                        or (self._work is not None
                            and self._work.check(self._entries, max(0, event.data_out.mip_node_count)))
                        or event.data_out.mip_dual_bound >= self._enough)
