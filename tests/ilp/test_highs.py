"""The adapter: programs as arrays, the same inside HiGHS as PuLP's; status, interruption."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy as np
import pulp
import pytest

from rkmate.errors import SolverError
from rkmate.ilp.highs import Highs, Status, status_of
from rkmate.ilp.rows import Rows


def rows() -> Rows:
    """Three items of which two are wanted, the dear one alone or both of the others."""
    program = Rows()
    dear, cheap, other = (program.column(name, 0, 1, cost, integer=integer) for name, cost, integer in (
        ("dear", 3.0, True), ("cheap", 1.0, True), ("a third", 0.25, False)))
    budget = program.column("budget", 0)
    program.at_least(1, (dear, cheap))
    program.at_least(0, (other,), (cheap,))
    program.weighted(0.5, ((budget, 1.0), (dear, -2.0), (cheap, -4.0)))
    return program


def same_in_pulp() -> pulp.LpProblem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        program = pulp.LpProblem("same", pulp.LpMinimize)
        dear, cheap = (pulp.LpVariable(name, 0, 1, "Integer") for name in ("dear", "cheap"))
        other, budget = pulp.LpVariable("a third", 0, 1), pulp.LpVariable("budget", 0)
        program += 3 * dear + cheap + 0.25 * other
        program += dear + cheap >= 1
        program += other - cheap >= 0
        program += budget - 2 * dear - 4 * cheap >= 0.5
    return program


@pytest.mark.parametrize(("budget", "objective", "chosen"), [(4.5, 1.25, "cheap"), (4.4, 3.0, "dear")])
def test_the_optimum_within_a_budget(budget: float, objective: float, chosen: str) -> None:
    program = Highs(rows())
    program.fix("budget", budget)
    answer = program.solve(10.0)
    assert answer.status is Status.OPTIMAL and answer.objective == pytest.approx(objective)
    assert {name for name in ("dear", "cheap") if answer.values[name] > 0.5} == {chosen}


def test_nothing_fits() -> None:
    program = Highs(rows())
    program.fix("budget", 2.4)
    assert program.solve(10.0).status is Status.INFEASIBLE


def test_the_same_arrays_as_pulps() -> None:
    def arrays(program: Highs) -> list[Any]:
        lp = program._highs.getLp()
        matrix = np.zeros((lp.num_row_, lp.num_col_))
        # PuLP's columns are handed over in the order of their names; spaces become underlines there.
        starts = list(lp.a_matrix_.start_)
        for k in range(len(starts) - 1):
            for at in range(starts[k], starts[k + 1]):
                place = int(lp.a_matrix_.index_[at])
                row, column = (k, place) if "Row" in str(lp.a_matrix_.format_) else (place, k)
                matrix[row, column] = lp.a_matrix_.value_[at]
        return [list(a) for a in (lp.col_cost_, lp.col_lower_, lp.col_upper_, lp.row_lower_,
                                  lp.row_upper_)] + [matrix.tolist(), list(lp.integrality_)]

    assert arrays(Highs(rows())) == arrays(Highs(same_in_pulp()))


def test_what_highs_does_not_take() -> None:
    program = Rows()
    program.column("lost", 0, 1, float("nan"))
    program.at_least(1, (0,))
    program.at_least(float("inf"), (0,))
    with pytest.raises(SolverError, match="does not take"):
        Highs(program)


@pytest.mark.parametrize(("name", "found", "status"), [
    ("kOptimal", True, Status.OPTIMAL),
    ("kModelEmpty", False, Status.OPTIMAL),
    ("kInfeasible", False, Status.INFEASIBLE),
    ("kUnboundedOrInfeasible", False, Status.INFEASIBLE),
    ("kTimeLimit", True, Status.FEASIBLE),
    ("kTimeLimit", False, Status.TIMED_OUT),
    ("kSolutionLimit", True, Status.FEASIBLE),
    ("kInterrupt", False, Status.TIMED_OUT),
])
def test_statuses(name: str, found: bool, status: Status) -> None:
    assert status_of(name, found=found) is status


def test_another_status_is_a_failure() -> None:
    with pytest.raises(SolverError, match="kSolveError"):
        status_of("kSolveError", found=False)


def test_every_status_that_is_named_is_one_of_highs() -> None:
    import highspy

    from rkmate.ilp.highs import _ENDS

    assert set(_ENDS) <= set(highspy.HighsModelStatus.__members__)


def hard() -> Rows:
    """Market split: minutes of branch and bound."""
    draw = random.Random(1)
    program = Rows()
    columns = [program.column(f"x{k}", 0, 1, integer=True) for k in range(60)]
    for row in range(6):
        weights = [draw.randint(0, 99) for _ in columns]
        over, under = (program.column(f"{side}{row}", 0, 10000, 1.0) for side in ("over", "under"))
        terms = [*zip(columns, map(float, weights), strict=True), (over, 1.0), (under, -1.0)]
        half = float(sum(weights) // 2)
        program.weighted(half, terms)
        program.weighted(-half, [(k, -w) for k, w in terms])
    return program


def test_an_event_ends_a_solve() -> None:
    stop = threading.Event()
    program = Highs(hard(), stop)
    stop.set()
    assert program.solve(3600.0).status in (Status.FEASIBLE, Status.TIMED_OUT)


def test_an_interrupt_ends_the_solve_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while HiGHS runs; the program can be solved again."""
    class Interrupted(threading.Thread):
        joined = 0

        def join(self, timeout: float | None = None) -> None:
            self.joined += 1
            if self.joined == 1:
                raise KeyboardInterrupt
            super().join(timeout)

    program = Highs(hard())
    with monkeypatch.context() as patch:
        patch.setattr("rkmate.support.side_process.threading.Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.solve(3600.0)
    assert program.solve(3600.0, nodes=1).status in (Status.FEASIBLE, Status.TIMED_OUT)
