"""One program of a block for all budgets."""

from __future__ import annotations

import pytest

from rkmate.ilp.grid import BlockProgram, peak, seconds
from rkmate.ilp.highs import Status
from rkmate.ilp.settings import OptionSettings
from tests.ilp.bank import chain, mlp_half


def test_infeasible_is_a_value() -> None:
    """Nothing saved, and no memory to recompute everything: only the solver can tell."""
    graph = chain(6, skips=0.3)
    block = BlockProgram(graph, OptionSettings(time_limit=60))
    solution = block.solve(block.model.lowest_peak, 0)
    assert solution.status is Status.INFEASIBLE
    assert solution.option is None
    assert solution.bound_seconds == float("inf")
    assert block.solve(3 * peak(block.save_all), 0).status is Status.OPTIMAL


def test_one_program_serves_all_budgets_in_any_order() -> None:
    graph = mlp_half()
    block = BlockProgram(graph, OptionSettings(gap=0.0, time_limit=60))
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
    block = BlockProgram(graph, OptionSettings(gap=0.0, time_limit=60))
    solution = block.solve(peak(block.save_all), block.save_all.saved_bytes // 3)
    assert solution.option is not None
    values = block.model.values(solution.option.backward)
    assert block.model.order(values) == solution.option.backward
