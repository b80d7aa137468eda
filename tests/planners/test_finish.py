"""The finishing pass: only ever faster, always within the budget."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import from_order, save_all
from rkmate.ir.simulate import simulate
from rkmate.planners.finish import finish, without_waste
from tests.ir.graphs import line, orders


@settings(max_examples=80, deadline=None)
@given(orders(), st.integers(0, 12), st.integers(0, 600))
def test_faster_and_within_the_budget(drawn: tuple[CDGraph, list[int]], more: int, reserve: int) -> None:
    plain, order = drawn
    graph = replace(plain, held=plain.outputs, reserve_at_loss=reserve)
    schedule = from_order(graph, order, order.index(graph.loss))
    before = simulate(graph, schedule)
    budget = before.peak + more
    finished = finish(graph, schedule, budget)
    after = simulate(graph, finished)
    assert after.peak <= budget and after.seconds <= before.seconds
    assert finish(graph, finished, budget) == finished


def test_memory_to_spare_is_spent() -> None:
    """A line whose first value is made again for the backward: with room for it, it stays."""
    graph = line(3)
    frugal = from_order(graph, [0, 1, 2, 3, 0, 4, 5], 3)
    assert frugal.recomputed() == {0: 1}
    roomy = finish(graph, frugal, simulate(graph, save_all(graph)).peak)
    assert roomy == save_all(graph)


def test_a_run_that_nothing_reads_goes() -> None:
    graph = line(2)
    wasteful = from_order(graph, [0, 1, 2, 0, 3], 2)
    assert without_waste(graph, wasteful.order, wasteful.loss_at) == save_all(graph)
