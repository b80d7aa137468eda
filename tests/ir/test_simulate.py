"""The judge of schedules: what it counts, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph, CNode, Cost, DNode
from rkmate.ir.schedule import Compute, Free, Loss, Schedule, Step, from_order, save_all
from rkmate.ir.simulate import LOSS_SCALARS, simulate
from tests.ir.graphs import line, orders


def test_a_line_by_hand() -> None:
    result = simulate(line(2), save_all(line(2)))
    #                           f0  f1  loss -v1 b1  -g2 -v0 b0  -g1
    assert result.timeline == (10, 20, 30, 20, 30, 20, 10, 20, 10)
    assert (result.peak, result.peak_at, result.saved, result.seconds) == (30, 2, 20, 6.0)


def test_temporaries_count_while_the_node_runs() -> None:
    graph = line(2).with_costs([Cost(1.0, 100), Cost(1.0, 0), Cost(1.0, 0), Cost(1.0, 0)])
    result = simulate(graph, save_all(graph))
    assert result.timeline[:2] == (110, 20) and result.peak_at == 0


def test_a_second_run_makes_all_outputs_anew() -> None:
    """The copy that is there stays until the new one has come."""
    graph = line(2)
    steps: tuple[Step, ...] = (Compute(0), Compute(0), *save_all(graph).steps[1:])
    assert simulate(graph, Schedule(steps)).timeline[:3] == (10, 20, 20)


def test_an_output_takes_its_donors_bytes() -> None:
    plain = line(2)
    graph = replace(plain, c=(plain.c[0], replace(plain.c[1], donors=(1,)), *plain.c[2:]))
    order = [0, 1, 0, 2, 3]
    assert simulate(plain, from_order(plain, order, 2)).timeline[:3] == (10, 20, 10)
    assert simulate(graph, from_order(graph, order, 2)).timeline[:3] == (10, 10, 10)


def test_a_gradient_that_leaves_when_it_is_made_takes_its_donors_bytes() -> None:
    """Nobody here needs it, but it is made, and handed over; what nobody needs at all takes no place."""
    plain = line(1)
    d = (*plain.d, DNode("part", 10, "grad"), DNode("sum", 10, "grad"))
    part, total = len(plain.d), len(plain.d) + 1
    c = (*plain.c, CNode("make", "backward", (), (part,)),
         CNode("add", "backward", (part,), (total,), donors=(part,)))
    peaks = []
    for releases in ({}, {total: len(c) - 1}):
        graph = replace(plain, d=d, c=c, releases=releases).verify()
        timeline = simulate(graph, save_all(graph)).timeline
        peaks.append(max(timeline[-4:]) - timeline[-1])
    assert peaks == [20, 10]


@pytest.mark.parametrize("reserve", [0, 100, LOSS_SCALARS, 2000])
def test_the_loss_allocates_and_keeps_a_little(reserve: int) -> None:
    graph = line(2).with_reserve(reserve)
    result = simulate(graph, save_all(graph))
    stays = min(reserve, LOSS_SCALARS)
    assert result.timeline[2] == max(20 + stays + 10, 20 + reserve)
    assert result.timeline[-1] == 10 + stays
    assert result.saved == 20


@pytest.mark.parametrize(("steps", "message"), [
    ((Compute(2),), "b1 runs before the loss"),
    ((Compute(1),), "f1 reads v0, not in memory"),
    ((Compute(0), Free(2)), "frees v1, which is not in memory"),
    ((Compute(0), Loss()), "the loss comes twice or without v1"),
    ((*save_all(line(2)).steps[:3], Loss()), "the loss comes twice"),
    (save_all(line(2)).steps[:5], "never runs b0"),
])
def test_what_cannot_run_is_refused(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(line(2), Schedule(steps))


def test_freeing_what_the_user_holds_is_refused() -> None:
    with pytest.raises(ScheduleError, match="frees v1, which the user holds"):
        simulate(replace(line(2), held=(2,)), save_all(line(2)))


@settings(max_examples=60, deadline=None)
@given(orders(), st.integers(0, 1000))
def test_invariants(drawn: tuple[CDGraph, list[int]], reserve: int) -> None:
    graph, order = drawn[0].with_reserve(reserve), drawn[1]
    loss_at = order.index(graph.loss)
    schedule = from_order(graph, order, loss_at)
    result = simulate(graph, schedule)
    assert result.seconds == schedule.seconds(graph)
    assert len(result.timeline) == len(schedule.steps)
    assert result.peak == max(result.timeline) == result.timeline[result.peak_at]
    # All that is left at the end is what outlives the graph, and the loss's scalars.
    assert result.timeline[-1] == graph.bytes(graph.input_grads) + min(reserve, LOSS_SCALARS)
    # The user's own references only add to the memory.
    held = replace(graph, held=graph.outputs)
    assert simulate(held, from_order(held, order, loss_at)).peak >= result.peak
