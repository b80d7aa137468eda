"""Recomputation and copies together: never worse than either, near the best of all ways on small graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Link
from rkmate.ir.schedule import Compute, save_all
from rkmate.ir.simulate import simulate
from rkmate.planners import offload_search
from rkmate.planners.default import Default
from rkmate.planners.offload import gaps_of, offload
from rkmate.planners.offload_search import Offloading, one_more_run, smallest_with_copies, without_link
from rkmate.planners.protocol import Candidate, Outcome, Problem, ask, found_in, infeasible, whole_step
from rkmate.planners.save_set import SaveSet
from rkmate.planners.settings import PlannerSettings
from tests.ir.graphs import line
from tests.planners.links import best_of_all, few_and_many, linked, links
from tests.planners.problems import problem_of, problems, stack, training_graph

AMPLE = 30.0
ALIKE = 1 + 1e-9
"""What a plan for a faster link may take, in times of that for the slower one."""
OWN = Default(PlannerSettings(save_set_seconds=AMPLE, first_seconds=AMPLE, smallest_seconds=1.0,
                              offload_seconds=AMPLE))


QUICK = Default(PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.2,
                                offload_seconds=AMPLE))


def small(seed: int, slows: float = 0.0) -> Problem:
    """Three computations in a row or not, each with one or two values, and their backward."""
    reads = [[], [0], [0, 1] if seed % 2 else [1]]
    graph: CDGraph = training_graph(reads, [4 + seed % 3, 5, 2], [1 + seed, 3, 2], [0, 1, seed % 3],
                                    [3, 0, 2], [True, seed % 2 == 0, False])
    return linked(problem_of(graph, []), Link(2.0 + seed, 4.0, computing_seconds_per_byte=slows))


@cache
def optimum(seed: int, below: int, slows: float = 0.0) -> tuple[Problem, int, float]:
    problem = small(seed, slows)
    budget = whole_step(problem).peak - below
    return problem, budget, best_of_all(problem, budget, most_again=1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("below", [2, 5])
def test_as_good_as_all_ways_on_small_graphs(seed: int, below: int) -> None:
    problem, budget, best = optimum(seed, below)
    found = OWN.plan(problem, budget)
    if found.schedule is None:
        assert best == float("inf")
        return
    assert problem.simulate(found.schedule).peak <= budget
    assert found.seconds <= best * 1.03
    assert found.bound is not None and found.bound <= min(best, found.seconds) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
@pytest.mark.parametrize("below", [1, 3, 6])
def test_as_good_as_all_ways_on_more_small_graphs(seed: int, below: int) -> None:
    test_as_good_as_all_ways_on_small_graphs(seed, below)
    test_the_programs_bound_is_one(seed, below)
    problem, budget, best = optimum(seed, below, 0.4)
    for planner in (OWN, SaveSet()):
        bound = planner.plan(problem, budget, time_limit=AMPLE).bound
        assert bound is not None and bound <= best * (1 + 1e-9)


def test_the_bound_counts_what_copying_takes_of_the_processor() -> None:
    problem = stack(4)
    whole = whole_step(problem)
    free, slowing = (SaveSet().plan(linked(problem, Link(1e6, 1e6, computing_seconds_per_byte=slows)),
                                    whole.peak * 3 // 5, time_limit=AMPLE) for slows in (0.0, 0.05))
    assert free.bound == pytest.approx(whole.seconds, rel=1e-3)
    assert slowing.bound is not None and whole.seconds * 1.01 < slowing.bound <= slowing.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("below", [2, 5])
def test_the_programs_bound_is_one(seed: int, below: int) -> None:
    problem, budget, best = optimum(seed, below)
    found = SaveSet().plan(problem, budget, time_limit=AMPLE)
    assert found.bound is not None and found.bound <= min(best, found.seconds) * (1 + 1e-9)


@few_and_many(8, 500)
def test_never_slower_than_without_copies(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(problems(most=5), links, st.floats(0.3, 1.0))
    def check(problem: Problem, link: Link, share: float) -> None:
        problem = linked(problem, link)
        budget = int(share * whole_step(problem).peak)
        alone = OWN.plan(without_link(problem), budget)
        both = OWN.plan(problem, budget)
        assert both.seconds <= alone.seconds * (1 + 1e-9)
        if both.schedule is not None:
            assert problem.simulate(both.schedule).peak <= budget
            assert both.bound is not None and both.bound <= both.seconds * (1 + 1e-9)
        assert OWN.smallest(problem, 1).peak <= OWN.smallest(without_link(problem), 1).peak

    check()


@few_and_many(8, 500)
def test_a_faster_link_is_not_slower(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(problems(most=5), links, st.floats(0.3, 1.0))
    def check(problem: Problem, link: Link, share: float) -> None:
        fast = replace(link, out_bytes_per_second=2 * link.out_bytes_per_second,
                       in_bytes_per_second=2 * link.in_bytes_per_second)
        slower, faster = linked(problem, link), linked(problem, fast)
        budget = int(share * whole_step(problem).peak)
        before = OWN.plan(slower, budget)
        after = OWN.plan(faster, budget)
        assert after.seconds <= before.seconds * ALIKE

    check()


def test_where_copies_gain_nothing_the_plan_has_none() -> None:
    problem = linked(stack(4), Link(1e-3, 1e-3))
    budget = whole_step(problem).peak * 3 // 4
    alone = OWN.plan(without_link(problem), budget)
    both = OWN.plan(problem, budget)
    assert alone.schedule is not None and both.schedule == alone.schedule and both.ops == alone.ops


def test_a_fast_link_leaves_nothing_to_recompute() -> None:
    problem = linked(stack(4), Link(1e6, 1e6))
    budget = QUICK.smallest(problem, 1).peak
    assert budget <= QUICK.smallest(without_link(problem), 1).peak
    found = QUICK.plan(problem, budget)
    assert found.schedule is not None and not found.schedule.recomputed()
    assert found.seconds == pytest.approx(whole_step(problem).seconds, rel=1e-3)
    assert QUICK.plan(problem, budget - 1).schedule is None


def test_a_slow_link_does_part_of_the_work() -> None:
    """Faster than recomputation alone, and than copies alone."""
    problem = linked(stack(6), Link(0.3, 0.3))
    budget = whole_step(problem).peak // 2
    alone = QUICK.plan(without_link(problem), budget)
    found = QUICK.plan(problem, budget)
    assert found.schedule is not None and found.schedule.copied and found.schedule.recomputed()
    assert found.seconds < alone.seconds


def twice_away() -> Problem:
    """A value that is read in the forward by what could take its place, and again in the backward. Memory is
    short before that reader, and right after it, where it may not be freed yet."""
    reads: list[list[int]] = [[], [0], [1], [0, 2], [3]]
    graph = training_graph(reads, [40, 1, 1, 1, 1], [4] * 5, [0] * 5, [0] * 5, [False] * 5)
    c = list(graph.c)
    c[2], c[4] = replace(c[2], overhead=200), replace(c[4], overhead=200)
    c[3] = replace(c[3], donors=(1,))
    return linked(problem_of(replace(graph, c=tuple(c)).verify(), []), Link(1e6, 1e6))


def test_the_smallest_peak_where_not_all_can_be_away_at_once() -> None:
    problem = twice_away()
    whole = whole_step(problem)
    least = gaps_of(problem.graph, whole.schedule).least
    assert offload(problem.graph, whole.schedule, least) is None
    found = smallest_with_copies(problem, whole, 10.0)
    assert found is not None and least < found.peak < whole.peak
    assert problem.simulate(found.schedule).peak == found.peak


class Clock:
    """Time goes by where something is asked: as long as it may take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spent: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def take(self, seconds: float | None) -> Outcome:
        assert seconds is not None
        self.spent.append(seconds)
        self.now += seconds
        return infeasible()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offload(*_: object, until: float, **more: object) -> None:
            self.take(until - self.now)

        monkeypatch.setattr(offload_search, "time", self)
        monkeypatch.setattr(offload_search, "offload", offload)


@pytest.mark.parametrize("limit", [0.0, 0.5, 5.0])
def test_planning_with_copies_keeps_its_time(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.use(monkeypatch)
    problem = linked(stack(3), Link(1.0, 1.0))
    method = Offloading(lambda problem, budget, seconds, known: clock.take(seconds), whole_step,
                        lambda problem, budget, seconds: clock.take(seconds), 10.0, 1e-4)
    monkeypatch.setattr(Offloading, "smallest", lambda self, problem: whole_step(problem))
    found = method.search(problem, whole_step(problem).peak // 2, limit, None)
    assert found.schedule is None
    assert clock.spent and sum(clock.spent) <= limit


def test_the_time_that_the_smallest_peak_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.use(monkeypatch)
    problem = linked(stack(3), Link(1.0, 1.0, most_bytes=1))
    assert smallest_with_copies(problem, whole_step(problem), 7.0) is None
    assert len(clock.spent) > 1 and sum(clock.spent) <= 7.0


def test_more_memory_is_never_slower() -> None:
    problem = linked(stack(4), Link(1.0, 1.0))
    top = whole_step(problem).peak
    known: list[Candidate] = []
    before = float("inf")
    for k in range(8, 21, 3):
        found = ask(QUICK, problem, top * k // 20, known=known or None)
        assert found.seconds <= before * (1 + 1e-9)
        before = found.seconds
        known += found_in(problem, found)


def test_a_value_is_made_anew_right_before_it_is_read() -> None:
    graph = line(3)
    base = save_all(graph)
    order = [step.c for step in base.steps if isinstance(step, Compute)]
    at = next(k for k, step in enumerate(base.steps) if step == Compute(4))      # b1 reads v1, which f0 makes
    more = one_more_run(graph, base, 1, at)
    assert order == [0, 1, 2, 3, 4, 5] and more is not None
    assert [step.c for step in more.steps if isinstance(step, Compute)] == [0, 1, 2, 3, 0, 4, 5]
    assert simulate(graph, more).seconds == simulate(graph, base).seconds + 1.0
    decides = replace(graph, c=(replace(graph.c[0], decides=True), *graph.c[1:]))
    assert one_more_run(decides, base, 1, at) is None
