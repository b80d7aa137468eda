"""Collectives that run while something else computes: in unused memory, in one order, and never while what
they read or make is freed, read or made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.plan import read_step, step_content
from rkmate.ir.schedule import Compute, Free, Loss, Schedule, Start, Step, save_all
from rkmate.ir.simulate import simulate
from rkmate.planners.overlap import SEEN, exposed, overlapped

F0, GATHER, F1, B1, SCATTER, DIVIDE, B0, LAST = range(8)
X, V0, WHOLE, V1, G2, GRAD, PART, MEAN, G1, G0 = range(10)


def _graph() -> CDGraph:
    """A product with a gathered weight, whose gradient is reduced, between two other operations."""
    d = [DNode("x", 0), DNode("v0", 10), DNode("whole", 8), DNode("v1", 10), DNode("g2", 10, "grad"),
         DNode("grad", 8, "grad"), DNode("part", 4, "grad"), DNode("mean", 4, "grad"),
         DNode("g1", 10, "grad"), DNode("g0", 10, "grad")]
    c = [CNode("f0", "forward", (X,), (V0,), 2.0),
         CNode("gather", "forward", (), (WHOLE,), 1.0, 1, exchanges=True),
         CNode("f1", "forward", (V0, WHOLE), (V1,), 2.0),
         CNode("b1", "backward", (V0, G2), (GRAD,), 2.0),
         CNode("scatter", "backward", (GRAD,), (PART,), 1.5, 1, exchanges=True),
         CNode("divide", "backward", (PART,), (MEAN,), 0.0, donors=(PART,)),
         CNode("b0", "backward", (G2,), (G1,), 3.0),
         CNode("last", "backward", (G1,), (G0,), 1.0)]
    return CDGraph(tuple(d), tuple(c), 3, (X,), (V1,), (G2,), (G0,), {MEAN: LAST}).verify()


def test_both_are_hidden_where_there_is_room() -> None:
    graph = _graph()
    plain = save_all(graph)
    found = overlapped(graph, plain, 100)
    before, after = simulate(graph, plain), simulate(graph, found)
    assert (before.seconds, before.exposed) == (12.5, 2.5)
    assert (after.seconds, after.exposed) == (10.0, 0.0)
    assert found.steps.index(Start(GATHER)) < found.steps.index(Compute(F0))
    assert found.steps.index(Start(SCATTER)) < found.steps.index(Compute(B0))
    assert found.waiting_at_once().order == (F0, GATHER, F1, B1, B0, SCATTER, DIVIDE, LAST)
    assert overlapped(graph, found, 100) is found


@pytest.mark.parametrize("budget", range(30, 48))
def test_the_budget_is_held(budget: int) -> None:
    graph = _graph()
    plain = save_all(graph)
    assert simulate(graph, plain).peak == 30
    after = simulate(graph, overlapped(graph, plain, budget))
    assert after.peak <= budget and after.seconds <= 12.5


def test_a_gathered_buffer_counts_from_its_start() -> None:
    graph = _graph()
    steps = [s for s in save_all(graph).steps if s != Compute(GATHER)]
    steps[:1] = [Start(GATHER), Compute(F0), Compute(GATHER)]
    #                                                      start f0  wait f1
    assert simulate(graph, Schedule(tuple(steps))).timeline[:4] == (9, 19, 19, 28)


def test_planners_see_what_computations_do_not_hide() -> None:
    graph = _graph()
    long = replace(graph, c=tuple(replace(c, time=8.0) if c.exchanges else c for c in graph.c))
    blocks = [(F0, B0, LAST), (GATHER, F1, B1, SCATTER, DIVIDE)]
    hidden, seen = exposed(graph, blocks).c, exposed(long, blocks).c
    assert hidden[GATHER].time == SEEN * 1.0 and hidden[SCATTER].time == pytest.approx(SEEN * 1.5)
    assert seen[GATHER].time == 8.0 - 4.0 and seen[SCATTER].time == 8.0 - 6.0
    assert [c for c in hidden if not c.exchanges] == [c for c in graph.c if not c.exchanges]


def _refused(graph: CDGraph, *steps: Step) -> str:
    with pytest.raises(ScheduleError) as refused:
        simulate(graph, Schedule(steps))
    return str(refused.value)


def test_what_a_running_collective_needs_is_refused() -> None:
    graph = _graph()
    assert "runs on it" in _refused(graph, Start(GATHER), Free(WHOLE))
    assert "has not made yet" in _refused(graph, Compute(F0), Start(GATHER), Compute(F1))
    assert "while a collective runs" in _refused(graph, Compute(F0), Start(GATHER), Loss())
    assert "is in memory" in _refused(graph, Compute(GATHER), Start(GATHER))
    assert "cannot be started" in _refused(graph, Start(GATHER), Start(GATHER))
    assert "cannot be started" in _refused(graph, Start(F0))
    assert "before the loss" in _refused(graph, Start(SCATTER))
    c = list(graph.c)
    c[GATHER] = replace(c[GATHER], inputs=(V0,), donors=(V0,))
    assert "cannot be started" in _refused(replace(graph, c=tuple(c)), Compute(F0), Start(GATHER))


def test_a_start_is_saved() -> None:
    assert step_content(Start(3)) == "start 3" and read_step("start 3") == Start(3)
