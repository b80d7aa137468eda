"""The save-set program: schedules that reach their own bound, checkpoint times, and what is reported."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest

import rkmate
from rkmate.ir.cd import CDGraph, CNode, DNode, Kernel
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Leave, Schedule, from_order, save_all
from rkmate.ir.simulate import simulate
from rkmate.pipeline.solve import runs_of
from rkmate.planners import save_set
from rkmate.planners.protocol import Candidate, Problem, ask, found_in
from rkmate.planners.save_set import SaveSet, SaveSetProgram, add_checkpoint_time, gradient_bytes
from tests.models import BANK
from tests.planners.problems import problem_of, stack, training_graph


def two_values(times: tuple[int, int]) -> Problem:
    """A chain whose last node is wide; the backward reads the first two values, of equal size."""
    graph = training_graph([[], [0], [1], [2], [3]], [10, 10, 1, 1, 1], [*times, 1, 1, 1],
                           [0, 0, 0, 0, 50], [0] * 5, [True, True, False, False, False])
    return problem_of(graph, [])


@pytest.mark.parametrize(("times", "cheap"), [((2, 5), 2.0), ((5, 2), 2.0), ((3, 3), 3.0)])
def test_the_cheaper_value_is_made_again(times: tuple[int, int], cheap: float) -> None:
    problem = two_values(times)
    whole = simulate(problem.graph, save_all(problem.graph))
    found = SaveSet().plan(problem, whole.peak - 5)
    assert found.seconds == pytest.approx(whole.seconds + cheap)
    assert found.bound == pytest.approx(found.seconds)


def test_the_bound_is_known_where_nothing_fits() -> None:
    problem = stack(4)
    whole = simulate(problem.graph, save_all(problem.graph))
    found = SaveSet().plan(problem, whole.peak // 4)
    assert found.schedule is None and found.bound is not None and found.bound >= whole.seconds


def test_a_schedule_for_less_memory_serves_a_larger_budget() -> None:
    problem = stack(4)
    top = simulate(problem.graph, save_all(problem.graph)).peak
    known: list[Candidate] = []
    times = []
    for k in range(8, 21, 2):
        found = ask(SaveSet(), problem, top * k // 20, known=known)
        known += found_in(problem, found)
        times.append(found.seconds)
    assert times == sorted(times, reverse=True)
    assert times[-1] < float("inf")


def test_work_ends_a_search_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is does not depend on the clock; what one search has left, another one finds."""
    problem = stack(6)
    budget = simulate(problem.graph, save_all(problem.graph)).peak * 6 // 10
    whole = SaveSet().plan(problem, budget)
    assert whole.worked is not None and not whole.cut_short and len(whole.others) > 1
    part = whole.worked / 4
    few = SaveSet(work=part).plan(stack(6), budget)
    assert few.cut_short and 0 < len(few.others) < len(whole.others)
    slow = functools.partial(next, itertools.count(0.0, 50.0))
    monkeypatch.setattr(save_set, "time", SimpleNamespace(perf_counter=slow))
    for work, found in ((part, few), (2 * whole.worked, whole)):
        again = SaveSet(work=work).plan(stack(6), budget, time_limit=1e4)
        assert (again.others, again.worked, again.cut_short) == (found.others, found.worked, found.cut_short)


def test_a_search_that_was_cut_short_goes_on() -> None:
    problem = stack(6)
    budget = simulate(problem.graph, save_all(problem.graph)).peak * 6 // 10
    whole = SaveSet().plan(stack(6), budget)
    assert whole.worked is not None and whole.bound is not None
    few, rest = (SaveSet(work=w).plan(problem, budget) for w in (whole.worked / 4, 2 * whole.worked))
    assert few.cut_short and not rest.cut_short and rest.others[:len(few.others)] == few.others
    assert (rest.seconds, rest.bound) == (whole.seconds, whole.bound)
    assert SaveSet(work=whole.worked / 4).plan(problem, budget) == few


def test_a_bound_that_is_enough_ends_a_search() -> None:
    problem = stack(6)
    whole = simulate(problem.graph, save_all(problem.graph))
    budget = whole.peak // 2
    until_the_end = SaveSet().plan(problem, budget)
    assert until_the_end.bound is not None and until_the_end.bound > whole.seconds
    soon = SaveSet(enough=(whole.seconds + until_the_end.bound) / 2).plan(stack(6), budget)
    assert soon.bound is not None and soon.worked is not None and until_the_end.worked is not None
    assert soon.bound <= until_the_end.bound * (1 + 1e-9)
    assert soon.worked < until_the_end.worked


def test_memory_of_gradients_is_what_the_simulator_counts() -> None:
    """At a backward node: all that is alive, less the forward values."""
    graph = stack(3).graph
    schedule = save_all(graph)
    result = simulate(graph, schedule)
    counted = gradient_bytes(graph)
    alive: set[int] = set()
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            alive |= set(graph.c[step.c].outputs)
            if step.c >= graph.loss:
                forward = graph.bytes(j for j in alive if (i := graph.producer[j]) is not None
                                      and i < graph.loss)
                assert result.timeline[k] == forward + counted[step.c - graph.loss]
        elif hasattr(step, "d"):
            alive.discard(step.d)


def test_more_checkpoint_times_never_lower_the_bound() -> None:
    problem = stack(4)
    graph = problem.graph
    budget = simulate(graph, save_all(graph)).peak * 7 // 10
    program = SaveSetProgram(graph)
    times: list[int] = []
    bounds = []
    for node in (graph.loss + 3, graph.loss + 9, graph.loss + 6):
        kept = program.solve(budget, times, time_limit=20.0)
        assert kept is not None
        bounds.append(kept.bound)
        times = add_checkpoint_time(times, node)
    assert times == sorted(times)
    assert all(b >= a * (1 - 0.011) for a, b in zip(bounds, bounds[1:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_plans_come_with_their_bound(name: str) -> None:
    sample = BANK[name]()
    plans = rkmate.tradeoff(sample.model, sample.args, sample.kwargs, budgets=[0.95, 0.8, 0.6],
                            settings=rkmate.Settings(costs="analytic"), progress=False)
    for plan in plans:
        assert plan.bound_seconds is not None and plan.gap is not None
        assert plan.baseline_seconds <= plan.bound_seconds * (1 + 1e-9)
        assert plan.bound_seconds <= plan.step_seconds * (1 + 1e-9)
        assert 0 <= plan.gap < 0.1
        assert "lower bound" in str(plan)
    assert plans[0].gap < 0.005
    assert {r.block for r in plans[-1].runs} == set(range(len(plans[-1].blocks)))


def test_runs_of_a_schedule() -> None:
    problem = stack(2)
    graph = problem.graph
    block_of = [0] * len(graph.c)
    for b, c in enumerate(problem.block_c):
        for i in c:
            block_of[i] = b
    runs = list(runs_of(save_all(graph), graph, block_of))
    last = len(problem.block_c) - 1
    assert [(r.block, r.phase) for r in runs] == \
        [(b, "forward") for b in range(last + 1)] + [(b, "backward") for b in range(last, -1, -1)]
    assert all(r.option is None for r in runs)
    kept = [r.saved_bytes for r in runs if r.phase == "forward"]
    assert all(k is not None and k > 0 for k in kept)
    assert all(r.saved_bytes is None for r in runs if r.phase == "backward")


def test_what_is_away_is_not_kept() -> None:
    graph = CDGraph(
        (DNode("x", 4), DNode("a", 8), DNode("loss", 1), DNode("ga", 8, "grad"), DNode("gx", 4, "grad")),
        (CNode("f", "forward", (0,), (1,), 1.0), CNode("g", "forward", (0,), (2,), 1.0),
         CNode("dg", "backward", (1,), (3,), 1.0), CNode("df", "backward", (3, 0), (4,), 1.0)),
        2, (0,), (2,), (), (4,)).verify()
    first, *rest = from_order(graph, range(4), 2).steps
    kept = [next(runs_of(Schedule((first, *copies, *rest)), graph, [0, 1, 1, 0])).saved_bytes
            for copies in ((), (CopyOut(1), Leave(1)), (CopyOut(1), Leave(1), CopyIn(1)))]
    assert kept == [8, 0, 8]


def test_what_runs_again_may_do_so_by_the_fastest_kernel() -> None:
    graph = CDGraph(
        (DNode("x", 4), DNode("a", 100), DNode("loss", 1), DNode("ga", 1, "grad"), DNode("gx", 4, "grad")),
        (CNode("f", "forward", (0,), (1,), 4.0, alternatives=(Kernel(1.0, 0),)),
         CNode("g", "forward", (1,), (2,), 1.0),
         CNode("dg", "backward", (1,), (3,), 1.0), CNode("df", "backward", (3, 0), (4,), 1.0)),
        2, (0,), (2,), (), (4,)).verify()
    found = SaveSetProgram(graph.with_reserve(50)).solve(120, (), time_limit=10.0)
    assert found is not None and 1 not in found.keep[0]
    assert found.bound == pytest.approx(1.0)


def test_what_one_node_needs_alone_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = stack(4)
    least = SaveSetProgram(problem.graph).least_bytes
    assert 0 < least <= simulate(problem.graph, save_all(problem.graph)).peak

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a program was solved")

    monkeypatch.setattr(SaveSetProgram, "solve", never)
    found = SaveSet().plan(problem, least - 1)
    assert found.schedule is None and "alone needs" in found.note
    with pytest.raises(AssertionError, match="was solved"):
        SaveSet().plan(problem, least)
