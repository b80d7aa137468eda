"""The adapter: programs as arrays, inside HiGHS as they were written; status, interruption."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from rkmate.errors import SolverError
from rkmate.ilp.highs import Highs, Rows, Status, Work, status_of


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


def matrix(program: Highs) -> list[list[float]]:
    """Inside HiGHS, row by row."""
    lp = program._highs.getLp()
    result = np.zeros((lp.num_row_, lp.num_col_))
    starts = list(lp.a_matrix_.start_)
    by_row = "Row" in str(lp.a_matrix_.format_)
    for k in range(len(starts) - 1):
        for at in range(starts[k], starts[k + 1]):
            place = int(lp.a_matrix_.index_[at])
            result[(k, place) if by_row else (place, k)] = lp.a_matrix_.value_[at]
    return result.tolist()


def test_arrays_inside_highs() -> None:
    """Variables stand in the order of their names, rows as they were written."""
    program = Highs(rows())
    lp = program._highs.getLp()
    assert program._index == {"a third": 0, "budget": 1, "cheap": 2, "dear": 3}
    assert list(lp.col_cost_) == [0.25, 0.0, 1.0, 3.0]
    assert list(lp.col_lower_) == [0.0] * 4 and list(lp.col_upper_) == [1.0, math.inf, 1.0, 1.0]
    assert [kind.name for kind in lp.integrality_] == ["kContinuous", "kContinuous", "kInteger", "kInteger"]
    assert list(lp.row_lower_) == [1.0, 0.0, 0.5] and list(lp.row_upper_) == [math.inf] * 3
    assert matrix(program) == [[0, 0, 1, 1], [1, 0, -1, 0], [0, 1, -4, -2]]


def test_rows_with_two_bounds() -> None:
    """Least and most of a sum; what weighs nothing is in no row."""
    program = Rows()
    some, other = program.column("some", 0, 10, -1.0), program.column("other", 0, 10, -1.0)
    program.weighted(2, [(some, 1.0), (other, 0.0)], 2)
    program.weighted(-math.inf, [(some, 1.0), (other, 2.0)], 5)
    inside = Highs(program)
    lp = inside._highs.getLp()
    assert list(lp.row_lower_) == [2.0, -math.inf] and list(lp.row_upper_) == [2.0, 5.0]
    assert matrix(inside) == [[0, 1], [2, 1]] and len(lp.a_matrix_.value_) == 3
    answer = inside.solve(10.0)
    assert answer.status is Status.OPTIMAL and answer.objective == pytest.approx(-3.5)


def test_a_variable_that_the_program_does_not_have_is_not_fixed() -> None:
    program = Highs(rows())
    program.fix("M_peak", 0.0)
    assert program.solve(10.0).objective == pytest.approx(1.25)


def test_what_highs_does_not_take() -> None:
    program = Rows()
    program.column("lost", 0, 1, float("nan"))
    program.at_least(1, (0,))
    program.at_least(float("inf"), (0,))
    with pytest.raises(SolverError, match="rejects the program"):
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


def test_work_ends_a_solve_at_the_same_place() -> None:
    """Again and again, and what ended one solve does not end the next one."""
    program = Highs(hard())

    def solve(limit: float) -> tuple[float, float, int]:
        work, before = Work(limit), program.iterations
        answer = program.solve(3600.0, work=work)
        assert answer.status in (Status.FEASIBLE, Status.TIMED_OUT) and work.is_over
        return answer.bound, work.spent, program.iterations - before

    first, longer = solve(0.1), solve(0.2)
    assert solve(0.1) == first and solve(0.2) == longer
    assert longer[1] > first[1] >= 0.1 and longer[2] > first[2]


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
        patch.setattr("rkmate.support.processes.threading.Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.solve(3600.0)
    assert program.solve(3600.0, nodes=1).status in (Status.FEASIBLE, Status.TIMED_OUT)


@pytest.mark.skipif(sys.platform == "win32", reason="the greeting is dropped elsewhere only")
def test_what_the_first_solver_writes_is_dropped() -> None:
    """Whatever this version of HiGHS does: something that C writes, like it."""
    program = (
        "import ctypes\nfrom rkmate.ilp.highs import _without_greeting\n"
        "write = ctypes.CDLL(None).puts\n"
        "print('before')\n"
        "with _without_greeting():\n    write(b'Running HiGHS')\n"
        "with _without_greeting():\n    write(b'second')\n"
        "print('after')\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["after", "before", "second"]
    first = "from rkmate.ilp.highs import Highs, Rows\nrows = Rows()\nrows.column('x', 0, 1)\n" \
            "rows.at_least(0, [0])\nHighs(rows)\nprint('{}')"
    assert subprocess.run([sys.executable, "-c", first], capture_output=True, text=True,
                          check=True).stdout == "{}\n"
