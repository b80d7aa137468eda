"""Problems with a link, and every way to send data away on small ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from rkmate.errors import ScheduleError
from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Link
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Leave, Loss, Schedule, Step, from_order
from rkmate.planners.offload import may_be_sent
from rkmate.planners.protocol import Problem

links = st.builds(Link, st.sampled_from([0.5, 1.0, 3.0, 20.0]), st.sampled_from([0.5, 1.0, 3.0, 20.0]),
                  st.sampled_from([0.0, 0.5]), st.sampled_from([0, 2]),
                  computing_seconds_per_byte=st.sampled_from([0.0, 0.2]))


def few_and_many(few: int, many: int) -> pytest.MarkDecorator:
    """Run a test with few examples, and, among the slow tests, with many."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def linked(problem: Problem, link: Link) -> Problem:
    """The problem with somewhere to send data to."""
    return replace(problem, graph=replace(problem.graph, link=link))


def best_of_all(problem: Problem, budget: int, most_again: int = 2) -> float:
    """The least seconds of any schedule of a small problem within a budget, by trying all: up to so many
    recomputations after the loss, each forward value sent away for one gap or not."""
    return min((problem.simulate(s).seconds for order in orders(problem.graph, most_again)
                for s in sent(problem, order) if problem.simulate(s).peak <= budget), default=float("inf"))


def orders(graph: CDGraph, most_again: int) -> Iterator[list[int]]:
    """The graph's order with up to so many forward nodes run again at places of the backward."""
    plain = list(range(len(graph.c)))
    places = [(b, i) for b in graph.backward for i in graph.forward]
    for n in range(most_again + 1):
        for chosen in itertools.combinations(places, n):
            order: list[int] = []
            for k in plain:
                order += [i for b, i in chosen if b == k]
                order.append(k)
            yield order


def sent(problem: Problem, order: list[int], most: int = 2) -> Iterator[Schedule]:
    """A schedule with all ways to send up to so many of its forward values away, once each, and for one
    time."""
    graph = problem.graph
    try:
        base = from_order(graph, order, graph.loss)
    except ScheduleError:
        return
    begins = [k for k, s in enumerate(base.steps) if isinstance(s, Compute | Loss)]
    values = [j for j, may in enumerate(may_be_sent(graph)) if may]
    ways = {j: list(_ways(graph, base, begins, j)) for j in values}
    for n in range(most + 1):
        for chosen in itertools.combinations([j for j in values if ways[j]], n):
            for picked in itertools.product(*(ways[j] for j in chosen)):
                yield _with(base, begins, tuple(zip(chosen, picked, strict=True)))


def _ways(graph: CDGraph, base: Schedule, begins: list[int], j: int) -> Iterator[tuple[int, int, int]]:
    """Moments before which the value may be copied, leave and return."""
    uses = [m for m, k in enumerate(begins) if isinstance(s := base.steps[k], Compute)
            and j in (*graph.c[s.c].inputs, *graph.c[s.c].outputs)]
    made = [m for m, k in enumerate(begins) if isinstance(s := base.steps[k], Compute)
            and j in graph.c[s.c].outputs]
    for before, after in itertools.pairwise(uses):
        if after in made:
            continue
        life = max(m for m in made if m <= before)
        for out in range(life + 1, after):
            for leave in range(max(out, before + 1), after):
                for back in range(leave + 1, after + 1):
                    yield out, leave, back


def _with(base: Schedule, begins: list[int],
          chosen: tuple[tuple[int, tuple[int, int, int]], ...]) -> Schedule:
    steps: list[Step] = []
    for k, step in enumerate(base.steps):
        if k in begins:
            m = begins.index(k)
            for place, kind in enumerate((CopyOut, Leave, CopyIn)):
                steps += [kind(j) for j, where in chosen if where[place] == m]
        steps.append(step)
    return Schedule(tuple(steps))
