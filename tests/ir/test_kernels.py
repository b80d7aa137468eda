"""By which kernel each step runs, and that everything counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph, CNode, Cost, DNode, Kernel, read_cost
from rkmate.ir.kernels import choose_kernels, seconds_to_save
from rkmate.ir.plan import read_step, step_content
from rkmate.ir.schedule import Compute, Free, Loss, from_order, in_place_donor
from rkmate.ir.simulate import simulate


def _graph(overhead: int, seconds: float = 1.0) -> CDGraph:
    """The second backward node works part by part, over its gradient, just below a peak of 100 bytes."""
    return CDGraph(
        (DNode("x", 10), DNode("grad_output", 10, "grad"), DNode("wide", 80, "grad"),
         DNode("grad", 20, "grad"), DNode("result", 20, "grad"), DNode("last", 1, "grad")),
        (CNode("f", "forward", (), (0,), 1.0),
         CNode("wide", "backward", (0, 1), (2,), 1.0),
         CNode("g", "backward", (2,), (3,), 1.0),
         CNode("parts", "backward", (3,), (4,), 2.0, overhead=2, donors=(3,),
               alternatives=(Kernel(seconds, overhead),)),
         CNode("h", "backward", (4,), (5,), 1.0)),
        1, (), (0,), (1,), (5,)).verify()


@pytest.mark.parametrize(("overhead", "seconds", "chosen"),
                         [(60, 1.0, True), (61, 1.0, False), (60, 2.0, True), (0, 2.1, False)])
def test_where_there_is_room_and_it_is_no_slower(overhead: int, seconds: float, chosen: bool) -> None:
    graph = _graph(overhead, seconds)
    schedule = from_order(graph, range(5), 1)
    before = simulate(graph, schedule)
    assert before.peak == 100
    found = choose_kernels(graph, schedule)
    after = simulate(graph, found)
    assert [s.c for s in found.steps if isinstance(s, Compute) and s.kernel] == ([3] if chosen else [])
    assert after.peak == before.peak
    assert after.seconds == found.seconds(graph) == before.seconds - (2.0 - seconds if chosen else 0)
    assert choose_kernels(graph, found) == found
    assert seconds_to_save(graph) == max(0.0, 2.0 - seconds)


@pytest.mark.parametrize(("kernels", "chosen"), [
    (((1.5, 10), (1.0, 60), (0.5, 61)), 2),      # the fastest that fits
    (((1.5, 10), (1.6, 40)), 1),                 # larger parts need not be faster
    (((1.5, 10), (1.5, 40)), 1),                 # as fast: the leaner one
    (((2.5, 10), (1.0, 61)), 0)])
def test_the_fastest_that_leaves_the_peak(kernels: tuple[tuple[float, int], ...], chosen: int) -> None:
    graph = _graph(0)
    others = tuple(Kernel(*k) for k in kernels)
    graph = replace(graph, c=tuple(replace(c, alternatives=others) if c.alternatives else c for c in graph.c))
    schedule = from_order(graph, range(5), 1)
    found = choose_kernels(graph, schedule)
    assert [s.kernel for s in found.steps if isinstance(s, Compute) and s.c == 3] == [chosen]
    assert simulate(graph, found).peak == simulate(graph, schedule).peak
    assert seconds_to_save(graph) == 2.0 - min(2.0, *(k.time for k in others))
    assert choose_kernels(graph, found) == found


def test_another_kernel_overwrites_nothing() -> None:
    graph = _graph(60)
    schedule = choose_kernels(graph, from_order(graph, range(5), 1))
    k = schedule.steps.index(Compute(3, kernel=1))
    assert in_place_donor(graph, schedule.steps, k) is None
    timeline = simulate(graph, schedule).timeline
    assert timeline[k] == 20 + 20 + 60           # both gradients, and its temporary memory
    assert timeline[k + 1] == 20


def test_graphs_without_such_kernels_are_left_alone() -> None:
    graph = _graph(0)
    graph = replace(graph, c=tuple(replace(c, alternatives=()) for c in graph.c))
    schedule = from_order(graph, range(5), 1)
    assert choose_kernels(graph, schedule) is schedule
    steps = tuple(s._replace(kernel=1) if s == Compute(3) else s for s in schedule.steps)
    with pytest.raises(ScheduleError, match="parts has no kernel 1"):
        simulate(graph, replace(schedule, steps=steps))


@pytest.mark.parametrize("step", [Compute(3), Compute(0), Compute(3, kernel=1), Compute(3, 2), Free(0),
                                  Free(7), Loss()])
def test_steps_in_a_file(step: Compute | Free | Loss) -> None:
    found = read_step(step_content(step))
    assert found == step
    assert type(found) is type(step)


@pytest.mark.parametrize("text", ["3 whole", "3 unchunked", "3 at once", "losses", "3 kernel", "3 kernel x"])
def test_other_steps_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|kernel|literal"):
        read_step(text)


@pytest.mark.parametrize("cost", [Cost(0.5, 3), Cost(0.5, 3, (Kernel(0.25, 7),)),
                                  Cost(0.5, 3, (Kernel(0.25, 7), Kernel(0.125, 9)))])
def test_costs_in_a_file(cost: Cost) -> None:
    assert read_cost(cost.row()) == cost
