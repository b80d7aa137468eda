"""What decides runs once, and what it made stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, Free, Schedule, from_order
from rkmate.ir.simulate import simulate
from tests.ir.graphs import line


def deciding(node: int = 0) -> CDGraph:
    """A line of which one forward node decides."""
    graph = line(3)
    return replace(graph, c=tuple(replace(c, decides=i == node) for i, c in enumerate(graph.c)))


AGAIN = [0, 1, 2, 0, 1, 3, 0, 4, 5]


def test_a_schedule_decides_once() -> None:
    assert from_order(line(3), AGAIN, 3).recomputed() == {0: 2, 1: 1}
    made = from_order(deciding(), AGAIN, 3)
    assert made.recomputed() == {1: 1} and made.loss_at == 3
    assert Free(1) not in made.steps                      # what was decided
    assert simulate(deciding(), made).seconds == simulate(line(3), from_order(line(3), AGAIN, 3)).seconds - 2


def test_runs_left_out_before_the_loss_move_it() -> None:
    made = from_order(deciding(), [0, 0, 1, 0, 2, 3, 4, 5], 5)
    assert made.order == (0, 1, 2, 3, 4, 5) and made.loss_at == 3


def test_deciding_a_second_time_is_refused() -> None:
    steps = list(from_order(deciding(), AGAIN, 3).steps)
    steps.insert(steps.index(Compute(3)), Compute(0))
    with pytest.raises(ScheduleError, match="f0 decides"):
        simulate(deciding(), Schedule(tuple(steps)))


def test_forgetting_what_was_decided_is_refused() -> None:
    steps = (*from_order(deciding(), AGAIN, 3).steps, Free(1))
    with pytest.raises(ScheduleError, match="v0, which was decided"):
        simulate(deciding(), Schedule(steps))
