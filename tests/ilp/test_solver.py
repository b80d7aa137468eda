"""Solvers agree, and say what they know."""

from __future__ import annotations

import pulp
import pytest

from rkmate.errors import ArgumentError
from rkmate.ilp import OptionSettings, Status, solve_block
from rkmate.ilp.evaluate_option import evaluate_option
from rkmate.ilp.grid import _BlockProgram
from rkmate.ilp.pareto_front import peak, seconds
from tests.ilp.bank import chain, mlp_half

# PuLP's bundled CBC is on its way out of PuLP; it serves here as the second opinion.
pytestmark = pytest.mark.filterwarnings("ignore:PULP_CBC_CMD:DeprecationWarning")
others = [name for name in pulp.listSolvers(onlyAvailable=True) if name != "HiGHS"]


@pytest.mark.parametrize("solver", others)
@pytest.mark.parametrize("fraction", [0.2, 0.6])
def test_any_pulp_solver_finds_the_same_time(solver: str, fraction: float) -> None:
    graph = mlp_half()
    save_all = evaluate_option(graph, graph.backward)
    m_save = int(fraction * save_all.saved_bytes)
    times = []
    for name in ("HiGHS", solver):
        solution = solve_block(graph, peak(save_all), m_save,
                               OptionSettings(solver=name, gap=1e-6, time_limit=60))
        assert solution.status is Status.OPTIMAL
        assert solution.option is not None
        times.append(seconds(solution.option))
    assert times[0] == pytest.approx(times[1], rel=1e-5)


@pytest.mark.parametrize("solver", ["HiGHS", *others])
def test_infeasible_is_a_value(solver: str) -> None:
    """Nothing saved, and no memory to recompute everything: only the solver can tell."""
    graph = chain(6, skips=0.3)
    block = _BlockProgram(graph, OptionSettings(solver=solver, time_limit=60))
    solution = block.solve(block.model.lowest_peak, 0)
    assert solution.status is Status.INFEASIBLE
    assert solution.option is None
    assert solution.bound_seconds == float("inf")
    assert block.solve(3 * peak(block.save_all), 0).status is Status.OPTIMAL


def test_an_unknown_solver_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ArgumentError, match=r"'Nobody'.*HiGHS"):
        solve_block(mlp_half(), 10**9, 0, OptionSettings(solver="Nobody"))


def test_one_program_serves_all_budgets_in_any_order() -> None:
    graph = mlp_half()
    block = _BlockProgram(graph, OptionSettings(gap=0.0, time_limit=60))
    top, saved = peak(block.save_all), block.save_all.saved_bytes
    tight = block.solve(top, saved // 4)
    block.solve(block.model.lowest_peak, 0)
    loose = block.solve(top, saved)
    again = block.solve(top, saved // 4, start=loose.option)
    assert loose.option is not None
    assert tight.option is not None
    assert again.option is not None
    assert seconds(loose.option) == pytest.approx(seconds(block.save_all))
    assert seconds(tight.option) == pytest.approx(seconds(again.option))


def test_a_solution_becomes_a_start_and_comes_back() -> None:
    graph = mlp_half()
    block = _BlockProgram(graph, OptionSettings(gap=0.0, time_limit=60))
    solution = block.solve(peak(block.save_all), block.save_all.saved_bytes // 3)
    assert solution.option is not None
    values = block.model.values(solution.option.backward)
    assert block.model.order(values) == solution.option.backward
