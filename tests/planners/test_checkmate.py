"""Checkmate's program against exhaustive search on plain graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import save_all
from rkmate.ir.simulate import simulate
from rkmate.planners.checkmate import Checkmate, plain_graph

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
            assert solution.status == "infeasible" and solution.schedule is None
            continue
        assert solution.status == "optimal" and solution.schedule is not None
        result = simulate(graph, solution.schedule)
        assert result.seconds == solution.seconds == row["bruteforce"]
        assert result.peak <= row["B"]
        assert solution.bound == pytest.approx(row["bruteforce"], rel=1e-6)
        assert solution.gap < 1e-6


def test_time_limit_is_a_value() -> None:
    solution = Checkmate(read("linear8")).solve(4, time_limit=0.01)
    assert solution.status in ("feasible", "timeout")
    assert solution.bound >= 17 - 1e-9


def test_an_output_in_a_dying_inputs_place() -> None:
    """Three steps of one size, each over its input: one place is enough."""
    plain = plain_graph([[], [0], [1]], [1, 1, 1], [10, 10, 10])
    nodes = tuple(replace(c, donors=c.inputs) for c in plain.c)
    graph = replace(plain, c=nodes, outputs=(2,)).verify()
    assert simulate(graph, save_all(graph)).peak == 10
    solution = Checkmate(graph).solve(10)
    assert solution.status == "optimal" and solution.seconds == 3
    assert Checkmate(replace(plain, outputs=(2,))).solve(10).status == "infeasible"


def test_a_value_that_is_read_again_is_not_overwritten() -> None:
    plain = plain_graph([[], [0], [0, 1]], [1, 1, 1], [10, 10, 10])
    nodes = tuple(replace(c, donors=c.inputs[:1]) for c in plain.c)
    graph = replace(plain, c=nodes, outputs=(2,)).verify()
    assert simulate(graph, save_all(graph)).peak == 20
    assert Checkmate(graph).solve(20).seconds == 3
    assert Checkmate(graph).solve(19).status == "infeasible"
