"""The offload pass: legal, within the budget, and as fast as any other way on small schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ir.link import Link
from rkmate.ir.schedule import CopyIn, CopyOut, Leave, save_all
from rkmate.ir.simulate import simulate
from rkmate.planners.offload import Offloaded, Placement, gaps_of, judged_within, offload, without_each
from rkmate.planners.protocol import Problem, whole_step
from tests.ir.graphs import line
from tests.planners.links import few_and_many, linked, links, sent
from tests.planners.problems import problem_of, problems, stack, training_graph
from tests.planners.send_all import send_all

FAST = Link(1e6, 1e6)


def passed(problem: Problem, budget: int) -> Offloaded | None:
    return offload(problem.graph, whole_step(problem).schedule, budget)


def test_a_fast_link_makes_room_for_nothing() -> None:
    """All that is not read now is away, and nobody waits to speak of."""
    problem = linked(stack(6), FAST)
    whole = whole_step(problem)
    least = gaps_of(problem.graph, whole.schedule).least
    assert least < whole.peak / 2
    found = passed(problem, least)
    assert found is not None and found.simulation.peak <= least
    assert found.simulation.seconds < whole.seconds * 1.001
    assert passed(problem, least - 1) is None


def test_what_fits_is_left_alone() -> None:
    problem = linked(stack(3), FAST)
    whole = whole_step(problem)
    found = passed(problem, whole.peak)
    assert found is not None and found.schedule == whole.schedule


def test_no_more_is_sent_than_needed() -> None:
    problem = linked(stack(6), Link(50.0, 50.0))
    whole = whole_step(problem)
    found = passed(problem, whole.peak - 1)
    assert found is not None and found.simulation.stalled == 0
    assert len(found.schedule.copied) == 1
    kinds = [type(s) for s in found.schedule.steps if isinstance(s, CopyOut | Leave | CopyIn)]
    assert kinds == [CopyOut, Leave, CopyIn]


def test_what_is_cheap_to_wait_for_is_sent() -> None:
    """Of two values of one size the one whose gap is longer."""
    graph = replace(line(6), link=Link(4.0, 4.0))
    schedule = save_all(graph)
    found = offload(graph, schedule, simulate(graph, schedule).peak - 1)
    assert found is not None and found.simulation.stalled == 0
    (away,) = found.schedule.copied
    assert graph.d[away].name in ("v0", "v1")


def test_buffers_and_the_most_that_may_be_away() -> None:
    problem = stack(6)
    whole = whole_step(problem)
    budget = whole.peak * 3 // 4
    plain = passed(linked(problem, FAST), budget)
    assert plain is not None
    away = plain.simulation.away
    bounded = passed(linked(problem, replace(FAST, most_bytes=away)), budget)
    assert bounded is not None and bounded.simulation.away <= away
    assert passed(linked(problem, replace(FAST, most_bytes=1)), budget) is None
    buffered = passed(linked(problem, replace(FAST, buffer_bytes=3)), budget)
    assert buffered is not None and buffered.simulation.peak <= budget
    assert buffered.simulation.away >= away


def test_a_value_returns_several_times() -> None:
    """A wide gap in the forward and one over the loss: one copy out, two back."""
    graph = training_graph([[], [0], [1], [2], [3], [0, 4]], [40, 1, 1, 1, 1, 1], [4] * 6, [0] * 6, [0] * 6,
                           [False] * 6)
    graph = replace(graph, c=tuple(replace(c, overhead={3: 200, 8: 160}.get(i, 0))
                                   for i, c in enumerate(graph.c))).verify()
    problem = linked(problem_of(graph, []), FAST)
    least = gaps_of(problem.graph, whole_step(problem).schedule).least
    found = passed(problem, least)
    assert found is not None
    out = [s.d for s in found.schedule.steps if isinstance(s, CopyOut)]
    back = [s.d for s in found.schedule.steps if isinstance(s, CopyIn)]
    assert sorted(out) == sorted(set(back))
    assert any(back.count(d) == 2 for d in out)


def test_what_might_be_overwritten_leaves_at_once_where_it_is_copied() -> None:
    """The first reader after its maker could take its place, and the moment right after that is the peak."""
    graph = line(3)
    c = list(graph.c)
    c[1], c[2] = replace(c[1], donors=(1,)), replace(c[2], overhead=30)
    graph = replace(graph, c=tuple(c), link=Link(1.0, 100.0))       # v0 takes ten seconds, and has one
    found = offload(graph, save_all(graph), simulate(graph, save_all(graph)).peak - 10)
    assert found is not None and found.schedule.copied == {1}
    assert found.simulation.stalled == pytest.approx(9.0)


def test_more_than_may_be_away_is_no_result() -> None:
    graph = replace(line(4), link=Link(1e6, 1e6))
    schedule = send_all(graph, save_all(graph))
    assert judged_within(graph, schedule, 1000) is not None
    assert judged_within(replace(graph, link=Link(1e6, 1e6, most_bytes=29)), schedule, 1000) is None


def test_nothing_is_tried_out_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is chosen, and waited for, each would be left out once."""
    problem = linked(stack(8), Link(0.1, 0.1))
    placed = Placement(gaps_of(problem.graph, whole_step(problem).schedule))
    placed.chosen[:] = True
    waits = placed.waits()[0]
    counted: list[int] = []
    monkeypatch.setattr(Placement, "waits", lambda self: counted.append(1) or (waits, self.at))
    assert without_each(placed, 10**6, waits, until=0.0) == waits and not counted
    assert without_each(placed, 10**6, waits, until=float("inf")) == waits and counted


@few_and_many(60, 1500)
def test_always_legal_and_within_the_budget(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(problems(most=6), links, st.floats(0.0, 1.0))
    def check(problem: Problem, link: Link, share: float) -> None:
        problem = linked(problem, link)
        whole = whole_step(problem)
        least = gaps_of(problem.graph, whole.schedule).least + link.buffer_bytes
        budget = least + int(share * (whole.peak - least))
        found = passed(problem, budget)
        assert found is not None and found.simulation.peak <= budget
        assert found.simulation.seconds >= whole.seconds * (1 - 1e-9)

    check()


def test_gaps_that_push_each_other_out_do_not_take_turns() -> None:
    """Copies back queue: one more makes another one begin before its data has left."""
    graph = training_graph([[], [0], [0, 1], [2], [3], [3, 4]], [1, 1, 2, 1, 1, 2], [1, 2, 3, 2, 3, 1],
                           [1, 3, 1, 1, 2, 3], [1, 0, 2, 0, 1, 2], [True, True, False, True, False, True])
    problem = linked(problem_of(graph, []), Link(3.0, 0.5, 0.5, 2))
    least = gaps_of(problem.graph, whole_step(problem).schedule).least + 2
    found = passed(problem, least)
    assert found is not None and found.simulation.peak <= least


@pytest.mark.parametrize("seed", range(6))
def test_as_fast_as_every_other_way(seed: int) -> None:
    """All ways to send up to two values of a schedule of four or five computations and their backward."""
    reads = [[], [0], [1], [1, 2], [0, 3]][:4 + seed % 2]
    n = len(reads)
    graph = training_graph(reads, [3 + (5 * i + seed) % 4 for i in range(n)],
                           [1 + (3 * i + seed) % 4 for i in range(n)], [i % 2 for i in range(n)],
                           [0] * n, [i % 2 == 0 for i in range(n)])
    problem = linked(problem_of(graph, []), Link(2.0 + seed, 3.0))
    whole = whole_step(problem)
    for budget in (whole.peak - 1, whole.peak - 4, whole.peak - 6):
        everything = [problem.simulate(s) for s in sent(problem, list(range(2 * n)))]
        optimum = min((s.seconds for s in everything if s.peak <= budget), default=None)
        found = passed(problem, budget)
        if optimum is not None:
            assert found is not None
            assert found.simulation.seconds <= optimum * 1.05
