"""Checkmate's program against exhaustive search, on plain graphs and on training graphs."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkmate.errors import ScheduleError
from rkmate.ilp.highs import Status
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import from_order, save_all
from rkmate.ir.simulate import simulate
from rkmate.planners.checkmate import Checkmate, rerunnable
from rkmate.planners.registry import planner
from tests.planners.problems import plain_graph, problem_of, training_graph

DATA = Path(__file__).parent / "data"
KNOWN = json.loads((DATA / "bruteforce_vs_ilp.json").read_text())


def read(name: str) -> CDGraph:
    """A graph file: ``args[v]`` are the nodes that v reads, costs are time and bytes."""
    content: dict[str, Any] = json.loads((DATA / f"graph_{name}.json").read_text())
    return plain_graph(content["args"], content["cost_cpu"], content["cost_ram"])


@pytest.mark.parametrize("name", KNOWN)
def test_known_optima_at_every_budget(name: str) -> None:
    graph = read(name)
    program = Checkmate(graph)
    for row in KNOWN[name]:
        solution = program.solve(row["B"])
        if row["bruteforce"] is None:
            assert solution.status is Status.INFEASIBLE and solution.schedule is None
            continue
        assert solution.status is Status.OPTIMAL and solution.schedule is not None
        result = simulate(graph, solution.schedule)
        assert result.seconds == solution.seconds == row["bruteforce"]
        assert result.peak <= row["B"]
        assert solution.bound == pytest.approx(row["bruteforce"], rel=1e-6)
        assert solution.gap < 1e-6


def test_time_limit_is_a_value() -> None:
    solution = Checkmate(read("linear8")).solve(4, time_limit=0.01)
    assert solution.status in (Status.FEASIBLE, Status.TIMED_OUT)
    assert solution.bound >= 17 - 1e-9


def test_an_output_in_a_dying_inputs_place() -> None:
    """Three steps of one size, each over its input: one place is enough."""
    plain = plain_graph([[], [0], [1]], [1, 1, 1], [10, 10, 10])
    nodes = tuple(replace(c, donors=c.inputs) for c in plain.c)
    graph = replace(plain, c=nodes, outputs=(2,)).verify()
    assert simulate(graph, save_all(graph)).peak == 10
    solution = Checkmate(graph).solve(10)
    assert solution.status is Status.OPTIMAL and solution.seconds == 3
    assert Checkmate(replace(plain, outputs=(2,))).solve(10).status is Status.INFEASIBLE


def test_a_value_that_is_read_again_is_not_overwritten() -> None:
    plain = plain_graph([[], [0], [0, 1]], [1, 1, 1], [10, 10, 10])
    nodes = tuple(replace(c, donors=c.inputs[:1]) for c in plain.c)
    graph = replace(plain, c=nodes, outputs=(2,)).verify()
    assert simulate(graph, save_all(graph)).peak == 20
    assert Checkmate(graph).solve(20).seconds == 3
    assert Checkmate(graph).solve(19).status is Status.INFEASIBLE


def all_schedules(graph: CDGraph) -> list[tuple[float, int]]:
    """(Seconds, peak) of every schedule that runs a node at most once a stage."""
    runs = [(t, i) for t, nodes in enumerate(rerunnable(graph, "any")) for i in nodes]
    found = []
    for chosen in itertools.product((False, True), repeat=len(runs)):
        order: list[int] = []
        loss_at = 0
        for t in range(len(graph.c)):
            loss_at = len(order) if t == graph.loss else loss_at
            order += [i for (stage, i), run in zip(runs, chosen, strict=True) if run and stage == t]
            order.append(t)
        try:
            schedule = from_order(graph, order, loss_at)
        except ScheduleError:
            continue
        result = simulate(graph, schedule)
        found.append((result.seconds, result.peak))
    return found


def small_training_graph(draw: random.Random, scale: int) -> CDGraph:
    """Three forward nodes, their backward, and outputs in the place of inputs of their size."""
    def numbers(low: int, high: int) -> list[int]:
        return [draw.randint(low, high) * scale for _ in range(3)]

    reads = [[], [0], draw.choice([[0], [1], [0, 1]])]
    graph = training_graph(reads, numbers(1, 6), [draw.randint(1, 5) for _ in range(3)], numbers(0, 3),
                           numbers(0, 2), [draw.random() < 0.5 for _ in range(3)])
    nodes = tuple(replace(c, donors=tuple(j for j in c.inputs if 0 < graph.d[j].size
                                          == graph.d[c.outputs[0]].size))
                  if len(c.outputs) == 1 and draw.random() < 0.5 else c for c in graph.c)
    return replace(graph, c=nodes).verify()


@pytest.mark.parametrize("seed", range(12))
def test_equals_exhaustive_search_where_the_loss_allocates(seed: int) -> None:
    draw = random.Random(seed)
    graph = small_training_graph(draw, 100)
    graph = replace(graph, held=graph.outputs if seed % 3 else (),
                    reserve_at_loss=draw.choice([0, 300, 512, 900]))
    known = all_schedules(graph)
    program = Checkmate(graph)
    for peak in sorted({peak for _, peak in known}):
        for budget in (peak - 1, peak):
            solution = program.solve(budget)
            least = min((s for s, p in known if p <= budget), default=None)
            if least is None:
                assert solution.status is Status.INFEASIBLE
            else:
                assert solution.status is Status.OPTIMAL
                assert solution.seconds == least == pytest.approx(solution.bound, rel=1e-6)


@pytest.mark.parametrize("name", ["checkmate", "auto"])
def test_a_budget_that_only_the_losss_own_bytes_exceed(name: str) -> None:
    problem = problem_of(small_training_graph(random.Random(2), 100), [1]).with_reserve(512)
    known = all_schedules(problem.graph)
    for budget in sorted({peak + more for _, peak in known for more in (-512, -100, -1, 0)}):
        outcome = planner(name).plan(problem, budget, time_limit=20.0)
        least = min((s for s, p in known if p <= budget), default=None)
        assert (outcome.seconds if outcome.schedule else None) == least


def test_a_reduced_budget_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver lets a byte too many through, the program is solved again with less."""
    graph = read("linear8")
    program = Checkmate(graph)
    exact = program.solve(5)
    fix = program.highs.fix
    given: list[float] = []

    def too_much(name: str, value: float) -> None:
        given.append(value)
        fix(name, 7.0 / program.model.byte if len(given) == 1 else 4.0 / program.model.byte)

    monkeypatch.setattr(program.highs, "fix", too_much)
    solution = program.solve(5)
    assert len(given) == 2 and solution.schedule is not None
    assert solution.seconds > exact.seconds > solution.bound
    assert solution.status is Status.FEASIBLE


def test_infeasible_names_the_class_of_schedules() -> None:
    problem = problem_of(small_training_graph(random.Random(0), 1), [1])
    outcome = planner("checkmate").plan(problem, 1)
    assert outcome.status == "infeasible"
    assert "within schedules that run a node at most once a stage" in outcome.note
