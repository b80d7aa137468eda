"""The peak of a step of several calls, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import from_order, save_all
from rkmate.ir.simulate import peak_of_calls, peak_with_gradients, simulate
from tests.ir.graphs import line, orders


@pytest.mark.parametrize(("calls", "peak"), [(1, 30), (2, 60), (3, 90)])
def test_a_line_by_hand(calls: int, peak: int) -> None:
    # f0  f1  loss -v1 b1  -g2 -v0 b0  -g1
    # 10, 20, 30,  20, 30, 20, 10, 20, 10; each other call holds 20, and the gradient of its output.
    assert peak_of_calls(line(2), save_all(line(2)), calls) == peak


def test_losses_wait_for_the_backwards_of_others() -> None:
    # Two losses wait, each with all of its bytes but those of a gradient of 10. A third one takes its 100 on
    # top of 20; its backward takes 30 at most, beside the 100.
    assert peak_of_calls(line(2).with_reserve(100), save_all(line(2)), 3) == 2 * (20 + 90) + 30 + 100


def test_gradients_of_parameters_wait_for_those_of_the_other_calls() -> None:
    graph = replace(line(2), c=tuple(replace(c, overhead=100 if c.name == "b0" else 0) for c in line(2).c))
    # b0 of the first call: 120 of its own, and what the second call has left: its input's gradient.
    alone = max(10 + 20 + 100, 30 + 120)
    assert peak_of_calls(graph, save_all(graph), 2) == alone
    number = next(j for j, d in enumerate(graph.d) if d.name == "g1")
    leaving = replace(graph, releases={number: 2})
    assert peak_of_calls(leaving, save_all(leaving), 2) == alone + graph.d[number].size


def test_gradients_of_parameters_that_stay_count_from_where_they_leave() -> None:
    graph = line(2)
    schedule = save_all(graph)
    alone = simulate(graph, schedule)
    assert peak_with_gradients(graph, schedule, alone) == alone.peak
    number = next(j for j, d in enumerate(graph.d) if d.name == "g2")
    leaving = replace(graph, releases={number: 1})
    # f0  f1  loss -v1 b1  -g2 -v0 b0  -g1: the gradient of 10 goes after b1, and stands beside the rest.
    assert peak_with_gradients(leaving, schedule, alone) == max(alone.peak, 10 + max(alone.timeline[5:]))


@given(orders(), st.integers(1, 4))
def test_more_calls_take_more(made: tuple[CDGraph, list[int]], calls: int) -> None:
    graph, order = made
    schedule = from_order(graph, order, order.index(graph.loss))
    peaks = [peak_of_calls(graph, schedule, n) for n in (calls, calls + 1)]
    one = simulate(graph, schedule)
    assert peaks[0] + one.saved <= peaks[1]
    assert peaks[0] >= one.peak
