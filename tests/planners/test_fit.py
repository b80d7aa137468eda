"""Schedules that need too much memory are made to fit: within the budget, and executable."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import save_all
from rkmate.planners.fit import fit
from rkmate.planners.protocol import whole_step
from tests.ir.graphs import line, orders
from tests.planners.problems import problem_of, stack, training_graph


@settings(max_examples=80, deadline=None)
@given(orders(), st.integers(0, 100))
def test_within_the_budget_and_no_faster_than_every_computation_once(
        drawn: tuple[CDGraph, list[int]], percent: int) -> None:
    graph, order = drawn
    problem = problem_of(graph, [])
    schedule = problem.schedule(order, order.index(graph.loss))
    budget = problem.simulate(schedule).peak * percent // 100
    found = fit(problem, schedule, budget).candidate
    if found is not None:
        result = problem.simulate(found.schedule)
        assert (result.peak, result.seconds) == (found.peak, found.seconds)
        assert found.peak <= budget and found.seconds >= whole_step(problem).seconds


def test_the_value_that_takes_the_least_time_for_each_byte_is_made_again() -> None:
    """The backward reads the first two values of a line, and the last node of its forward is wide."""
    graph = training_graph([[], [0], [1], [2], [3]], [10, 10, 1, 1, 1], [5, 2, 1, 1, 1],
                           [0, 0, 0, 0, 50], [0] * 5, [True, True, False, False, False])
    problem = problem_of(graph, [])
    whole = whole_step(problem)
    found = fit(problem, whole.schedule, whole.peak - 5).candidate
    assert found is not None and found.schedule.recomputed() == {1: 1}
    assert found.seconds == whole.seconds + 2


def test_what_runs_once_does_not_run_again() -> None:
    problem = stack(4)
    whole = whole_step(problem)
    found = fit(problem, whole.schedule, whole.peak * 6 // 10).candidate
    assert found is not None and found.schedule.recomputed()
    wished = replace(problem, graph=replace(problem.graph, once=frozenset(found.schedule.recomputed())))
    other = fit(wished, whole.schedule, whole.peak * 6 // 10).candidate
    assert other is None or wished.graph.once.isdisjoint(other.schedule.recomputed())


def test_nothing_fits_into_too_little() -> None:
    problem = problem_of(line(3), [])
    assert fit(problem, save_all(problem.graph), 0).candidate is None
