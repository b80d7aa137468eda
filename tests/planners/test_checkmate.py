"""Checkmate's program against exhaustive search on plain graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rkmate.graph.cd import CDGraph
from rkmate.planners.checkmate import Checkmate, plain_graph
from rkmate.schedule.simulate import simulate

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
