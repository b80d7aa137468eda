"""From an order to a schedule: everything is freed as early as possible, and never too early."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import (
    Compute,
    Free,
    Loss,
    Schedule,
    freed_after,
    from_order,
    in_place_donor,
    save_all,
)
from rkmate.ir.simulate import simulate
from tests.ir.graphs import line, orders


def test_saving_all_of_a_line() -> None:
    # x=0, v0 v1=1 2, g0 g1 g2 = 3 4 5; v1 is the output, g2 arrives, g0 leaves.
    assert list(save_all(line(2)).steps) == [
        Compute(0), Compute(1), Loss(), Free(2), Compute(2), Free(1), Free(5), Compute(3), Free(4)]


def test_a_value_is_freed_before_it_is_made_again() -> None:
    schedule = from_order(line(2), [0, 1, 0, 2, 3], 2)
    assert list(schedule.steps[:6]) == [Compute(0), Compute(1), Free(1), Loss(), Free(2), Compute(0)]
    assert schedule.order == (0, 1, 0, 2, 3) and schedule.loss_at == 2
    assert schedule.recomputed() == {0: 1}
    assert schedule.seconds(line(2)) == 1 + 1 + 1 + 2 + 2


def test_what_the_user_holds_is_never_freed() -> None:
    assert Free(2) not in save_all(replace(line(2), held=(2,))).steps


def test_a_released_gradient_stays_until_its_release() -> None:
    graph = replace(line(2), input_grads=(), releases={4: 3}).verify()
    # g1 is read last by node 3, and leaves with it; g0 is of no use to anybody.
    assert set(save_all(graph).steps[-2:]) == {Free(3), Free(4)}
    later = replace(line(3), releases={6: 5}).verify()          # g2, read by node 4 for the last time
    assert Free(6) in save_all(later).steps[-2:]
    assert Free(6) not in save_all(line(3)).steps[-2:]


def test_reading_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"step 0 \(f1\) reads v0, which is not in memory"):
        from_order(line(2), [1, 0, 2, 3], 2)


def test_freed_after() -> None:
    steps = (Compute(0), Free(1), Free(2), Compute(1), Free(3), Loss(), Free(4))
    assert freed_after(steps, 0) == {1, 2}
    assert freed_after(steps, 3) == {3}
    assert freed_after(steps, 4) == set()
    assert freed_after(steps, 6) == set()


def with_donors(graph: CDGraph, i: int, donors: tuple[int, ...]) -> CDGraph:
    nodes = list(graph.c)
    nodes[i] = replace(nodes[i], donors=donors)
    return replace(graph, c=tuple(nodes))


def test_in_place_donor() -> None:
    graph = with_donors(line(2), 1, (1,))
    keeps = save_all(graph)                                     # v0 is read by the backward
    assert in_place_donor(graph, keeps.steps, 1) is None
    frees = from_order(graph, [0, 1, 0, 2, 3], 2)
    assert in_place_donor(graph, frees.steps, 1) == 1
    assert in_place_donor(graph, frees.steps, 0) is None        # has no donors
    useless = (Compute(0), Compute(1), Free(2), Free(1))        # nothing stays: nothing to take over
    assert in_place_donor(graph, useless, 1) is None


@settings(max_examples=60, deadline=None)
@given(orders())
def test_as_early_as_possible_and_never_too_early(drawn: tuple[CDGraph, list[int]]) -> None:
    """It runs, and freeing anything one computation sooner would take it from a reader."""
    graph, order = drawn
    loss_at = order.index(graph.loss)
    schedule = from_order(graph, order, loss_at)
    assert list(schedule.order) == order and schedule.loss_at == loss_at
    simulate(graph, schedule)
    steps = schedule.steps
    for k, step in enumerate(steps):
        if isinstance(step, Free):
            before = next(m for m in range(k - 1, -1, -1) if not isinstance(steps[m], Free))
            done = steps[before]
            if isinstance(done, Compute):
                node = graph.c[done.c]
                used = {*node.inputs, *node.outputs}
                assert step.d in used or graph.releases.get(step.d) == done.c
            else:
                assert step.d in (*graph.outputs, *graph.output_grads)


def test_schedules_are_values() -> None:
    assert save_all(line(2)) == Schedule(save_all(line(2)).steps)
