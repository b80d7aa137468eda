"""Lower sets: ten graphs with known answers at every budget, and the limits that must hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rkmate.errors import ArgumentError, GraphError
from rkmate.planners.canonical import Dag, members
from rkmate.planners.lower_sets import (
    LowerSetProgram,
    TooManyLowerSets,
    all_lower_sets,
    count_lower_sets,
    estimated_seconds,
    pruned_lower_sets,
)
from rkmate.planners.registry import planner
from tests.planners.problems import overhead, peak, problem_of, training_graph

CASES = json.loads((Path(__file__).parent / "data" / "lower_sets.json").read_text())


def read(graph: dict[str, Any]) -> Dag:
    return Dag(tuple(graph["T"]), tuple(graph["M"]), tuple(map(tuple, graph["edges"])))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["exact", "pruned"])
def test_known_answers_at_every_budget(name: str, family: str) -> None:
    case = CASES[name]
    dag = read(case["graph"])
    known = case["exact" if family == "exact" else "approx"]
    program = LowerSetProgram(dag, family)  # type: ignore[arg-type]
    assert program.minimum_bytes() == known["min_feasible_B"]
    assert program.solve(known["min_feasible_B"] - 1) is None
    steps = known["by_budget"]
    for budget in range(known["min_feasible_B"], steps[-1]["B_from"] + 3):
        step = max((s for s in steps if s["B_from"] <= budget), key=lambda s: s["B_from"])
        time, memory = program.solve(budget, "time"), program.solve(budget, "memory")
        assert time is not None and memory is not None
        assert (overhead(dag, time), overhead(dag, memory)) == (step["TC_overhead"], step["MC_overhead"])
        assert max(peak(dag, time), peak(dag, memory)) <= budget
        assert time[-1] == (1 << len(dag)) - 1


@pytest.mark.parametrize("name", CASES)
def test_families_and_equations(name: str) -> None:
    case = CASES[name]
    dag = read(case["graph"])
    assert len(all_lower_sets(dag)) == count_lower_sets(dag) == case["n_lower_sets_incl_empty"]
    assert len(pruned_lower_sets(dag)) == case["n_pruned_incl_empty_and_V"]
    for step in case["exact"]["by_budget"]:
        for kind in ("TC", "MC"):
            sets = [sum(1 << v for v in s) for s in step[f"{kind}_seq"]]
            assert overhead(dag, sets) == step[f"{kind}_overhead"]
            assert peak(dag, sets) == step[f"{kind}_seq_peak"]


def test_exact_refuses_what_it_cannot_enumerate() -> None:
    wide = Dag((1.0,) * 40, (1,) * 40, ())
    with pytest.raises(TooManyLowerSets, match=r"1,099,511,627,776 lower sets"):
        LowerSetProgram(wide, "exact")


def test_exact_refuses_by_estimated_time_and_runs_when_asked() -> None:
    """Nine branches of one node each: 2^9 sets between two nodes."""
    edges = tuple((0, v) for v in range(1, 10)) + tuple((v, 10) for v in range(1, 10))
    dag = Dag((1.0,) * 11, (1,) * 11, edges)
    with pytest.raises(TooManyLowerSets, match=r"514 lower sets.* about 1 s, and has 0\.2 s"):
        LowerSetProgram(dag, "exact", time_limit=0.2)
    assert estimated_seconds(514) == pytest.approx(0.53, abs=0.01)
    asked = LowerSetProgram(dag, "exact", time_limit=2.0)
    assert len(asked.sets) == 514 and asked.minimum_bytes() > 0


def test_the_planner_runs_the_exact_family_in_the_time_that_it_is_given() -> None:
    n = 9
    graph = training_graph([[], *([0] for _ in range(n)), list(range(1, n + 1))], [2] * (n + 2),
                           [1] * (n + 2), [0] * (n + 2), [0] * (n + 2), [False] * (n + 2))
    problem = problem_of(graph, [1])
    refused = planner("lower-sets-exact").plan(problem, 10**6, time_limit=0.1)
    assert refused.status == "infeasible" and "514 lower sets" in refused.note
    assert planner("lower-sets-exact").plan(problem, 10**6, time_limit=60.0).status == "ok"


@pytest.mark.parametrize("columns", [1, 3, 128])
def test_steps_are_the_same_whatever_is_tabulated_at_once(columns: int,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    dag = read(CASES["inception8"]["graph"])
    known = LowerSetProgram(dag, "exact")
    monkeypatch.setattr("rkmate.planners.lower_sets.COLUMNS", columns)
    monkeypatch.setattr("rkmate.planners.lower_sets.KEPT_SETS", 0)
    found = LowerSetProgram(dag, "exact")
    least = known.minimum_bytes()
    assert found.minimum_bytes() == least
    assert [found.solve(b) for b in range(least, least + 8)] == [
        known.solve(b) for b in range(least, least + 8)]


def test_hundreds_of_nodes_with_the_pruned_family() -> None:
    draw = random.Random(3)
    n = 568
    edges = {(v - 1, v) for v in range(1, n)} | {(max(0, v - draw.randint(2, 9)), v)
                                                 for v in range(9, n, 3)}
    dag = Dag(tuple(10 if draw.random() < 0.3 else 1 for _ in range(n)),
              tuple(draw.randint(1, 50) for _ in range(n)), tuple(sorted(edges)))
    program = LowerSetProgram(dag)
    least = program.minimum_bytes()
    found = program.solve(least)
    assert found is not None and peak(dag, found) <= least
    assert program.solve(least - 1) is None


def test_wrong_arguments() -> None:
    dag = Dag((1.0,), (1,), ())
    with pytest.raises(ArgumentError, match="family"):
        LowerSetProgram(dag, "all")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="centric"):
        LowerSetProgram(dag).solve(3, "both")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="topological"):
        Dag((1.0, 1.0), (1, 1), ((1, 0),))
    assert members(0b1010) == [1, 3]
