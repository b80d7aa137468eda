"""The paper's bounds, seen in simulated runs."""

from __future__ import annotations

import math

import pytest

from benchmarks.dtr_chains import adversary, linear_chain
from rkmate.dtr.simulator import Trace, simulate
from rkmate.errors import ArgumentError


@pytest.mark.parametrize(
    ("heuristic", "constant"), [("e*", 4.0), ("dtr", 3.1), ("dtr-eq", 3.1)]
)
@pytest.mark.parametrize("length", [64, 256, 1024])
def test_theorem_3_1(heuristic: str, constant: float, length: int) -> None:
    # O(N) operations at a budget of 2 * ceil(sqrt(N)): the ratio stays under one constant.
    budget = 2 * math.ceil(math.sqrt(length))
    result = simulate(linear_chain(length), heuristic, budget)
    assert result.status == "ok"
    assert result.max_memory <= budget
    assert result.model_compute == 2 * length
    assert result.model_compute + result.remat_compute <= constant * length


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heuristic", "constant"), [("e*", 4.0), ("dtr", 3.1), ("dtr-eq", 3.1)]
)
def test_theorem_3_1_at_4096(heuristic: str, constant: float) -> None:
    result = simulate(linear_chain(4096), heuristic, 128)
    assert result.status == "ok"
    assert result.model_compute + result.remat_compute <= constant * 4096


def test_a_heuristic_without_costs_is_not_linear() -> None:
    # The bound is the heuristic's merit: least recently used needs more per node as N grows.
    ratios = []
    for length in (64, 256, 1024):
        result = simulate(
            linear_chain(length), "lru", 2 * math.ceil(math.sqrt(length)), overhead_limit=100
        )
        ratios.append((result.model_compute + result.remat_compute) / length)
    assert ratios[0] < ratios[1] / 1.5 < ratios[2] / 3


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eq", "dtr-local", "lru", "size", "msps", "e*"])
@pytest.mark.parametrize(("paths", "nodes"), [
    (4, 200), (10, 200), pytest.param(16, 400, marks=pytest.mark.slow)])
def test_theorem_3_2(heuristic: str, paths: int, nodes: int) -> None:
    duel = adversary(heuristic, paths, nodes)
    assert sum(duel.paths) == nodes
    # Each new node costs its whole path: nothing of it was in memory, and nothing runs twice.
    assert duel.operations == sum(length * (length + 1) // 2 for length in duel.paths)
    # The proof's lower bound, with its constant of 1/2; a static schedule needs one operation per
    # node.
    assert duel.operations >= nodes**2 / (2 * paths)


def test_trace_replays_to_the_reported_peak() -> None:
    trace = Trace(events=[], memory=[])
    length = 200
    result = simulate(linear_chain(length), "e*", 2 * math.ceil(math.sqrt(length)), trace=trace)
    assert max(level for _, level in trace.memory) == result.max_memory
    computed = sum(kind != "evict" for _, kind, _ in trace.events)
    assert computed == result.model_compute + result.remat_compute
    present: set[str] = set()
    for _, kind, name in trace.events:
        if kind == "evict":
            present.remove(name)
        else:
            assert name not in present
            present.add(name)


def test_bad_sizes() -> None:
    with pytest.raises(ArgumentError):
        linear_chain(1)
    with pytest.raises(ArgumentError):
        adversary("lru", 5, 4)
