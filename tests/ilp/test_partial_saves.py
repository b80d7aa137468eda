"""What first forwards keep: every number is what the simulator says of the same nodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ilp import OptionSettings, block_options
from rkmate.ilp.partial_saves import partial_save, partial_saves
from tests.ilp.bank import attention_half, mlp_half, random_graph

QUICK = OptionSettings(grid=(3, 3), time_limit=0.5)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_later_runs_take_no_more(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 4), rng.randint(1, 3))
    found = block_options(graph, QUICK).options
    inner = [j for i in graph.forward for j in graph.c[i].outputs if j not in graph.outputs]
    kept = frozenset(j for j in inner if rng.random() < 0.5)
    result = partial_save(graph, found, kept)
    assert result.bytes == graph.bytes(kept)
    assert result.first_peak_bytes >= result.bytes
    assert result.forward_seconds <= sum(graph.c[i].time for i in graph.forward)
    assert result.forward_seconds == pytest.approx(sum(graph.c[i].time for i in result.forward))
    least = min(o.forward_seconds + o.backward_seconds for o in found)
    assert min(o.forward_seconds + o.backward_seconds for o in result.options) <= least + 1e-9
    for o in result.options:
        # Each node finds what it reads: kept, given, or made before.
        there = {*graph.inputs, *kept}
        for i in (*o.forward, *o.backward):
            there |= set(graph.output_grads) if i >= graph.loss else set()
            assert there.issuperset(graph.c[i].inputs)
            there |= set(graph.c[i].outputs)


def test_nothing_kept_changes_nothing() -> None:
    graph = mlp_half()
    found = block_options(graph, QUICK).options
    result = partial_save(graph, found, frozenset())
    assert result.bytes == 0 and result.forward_seconds == sum(
        graph.c[i].time for i in graph.forward if i in result.forward)
    figures = {(o.saved_bytes, o.forward_peak_bytes, o.backward_peak_bytes) for o in found}
    assert all((o.saved_bytes, o.forward_peak_bytes, o.backward_peak_bytes) in figures
               for o in result.options)


def test_there_are_as_many_saves_for_all_classes() -> None:
    graphs = [mlp_half(), attention_half()]
    found = [block_options(g, QUICK).options for g in graphs]
    result = partial_saves(graphs, found, 4)
    assert len(result) == 2 and len(result[0]) == len(result[1]) <= 4
    assert any(k.bytes for kept in result for k in kept)
