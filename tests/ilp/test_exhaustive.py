"""The integer program against exhaustive search, at every budget that makes a difference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ilp.grid import BlockProgram, block_options, budgets, evaluate_option, peak, seconds
from rkmate.ilp.highs import Status
from rkmate.ilp.model import BlockModel
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.stages import split_stages
from rkmate.ir.cd import CDGraph, CNode, DNode
from tests.ilp.bank import random_graph
from tests.ilp.exhaustive import all_options, fastest

EXACT = OptionSettings(gap=0.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_program_finds_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 3), rng.randint(1, 3))
    options = list(all_options(graph))
    corners = {(peak(o), o.saved_bytes) for o in options}
    corners |= {(p - 1, s) for p, s in corners} | {(p, s - 1) for p, s in corners}
    for m_peak, m_save in sorted(corners):
        solution = BlockProgram(graph, EXACT).solve(m_peak, m_save)
        best = fastest(options, m_peak, m_save)
        if best == float("inf"):
            assert solution.status is Status.INFEASIBLE
            assert solution.option is None
            continue
        assert solution.status is Status.OPTIMAL
        assert solution.option is not None
        assert seconds(solution.option) == pytest.approx(best)
        assert solution.bound_seconds <= best + 1e-9
        assert peak(solution.option) <= m_peak
        assert solution.option.saved_bytes <= m_save


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_grid_misses_nothing(seed: int) -> None:
    """Skipped pairs of budgets have answers that are as good as those of a solve."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 3), rng.randint(1, 3))
    grid = (5, 5)
    found = block_options(graph, OptionSettings(grid=grid, gap=0.0))
    assert found.timed_out == 0
    options = list(all_options(graph))
    save_all = evaluate_option(graph, graph.backward)
    lowest = BlockModel(split_stages(graph), peak(save_all)).lowest_peak
    for m_peak, m_save in budgets(lowest, save_all, grid):
        best = fastest(options, m_peak, m_save)
        assert fastest(list(found.options), m_peak, m_save) == pytest.approx(best)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_coarse_units_of_memory_never_exceed_a_budget(seed: int) -> None:
    """Sizes without a common divisor are rounded up, so solutions fit whatever the unit is."""
    rng = random.Random(seed)
    graph = random_graph(rng, 3, 3)
    odd = tuple(replace(d, size=d.size * 1_000_003 + (rng.randint(1, 999) if d.size else 0))
                for d in graph.d)
    graph = replace(graph, d=odd).verify()
    save_all = evaluate_option(graph, graph.backward)
    model = BlockModel(split_stages(graph), peak(save_all))
    assert model.unit > 1 or peak(save_all) <= 200_000
    for fraction in (0.5, 0.8, 1.0):
        m_peak, m_save = int(fraction * peak(save_all)), int(fraction * save_all.saved_bytes)
        solution = BlockProgram(graph, EXACT).solve(m_peak, m_save)
        if solution.option is not None:
            assert peak(solution.option) <= m_peak
            assert solution.option.saved_bytes <= m_save


def test_recomputing_early_may_pay() -> None:
    """A large value is there in the first stage; the small one made of it is read in the last.

    Between them there is no room for the large one. Carrying the small one is cheaper than making
    the large one twice; only a program that may recompute ahead of need finds that.
    """
    big, small, g0, g1, g2, g3 = range(1, 7)
    graph = CDGraph(
        (DNode("x", 0), DNode("big", 8), DNode("small", 1), DNode("g0", 1, "grad"),
         DNode("g1", 1, "grad"), DNode("g2", 1, "grad"), DNode("g3", 1, "grad")),
        (CNode("make", "forward", (0,), (big,), 5.0),
         CNode("shrink", "forward", (big,), (small,), 1.0),
         CNode("b0", "backward", (g0, big), (g1,), 1.0),
         CNode("hungry", "backward", (g1,), (g2,), 1.0, overhead=10),
         CNode("b1", "backward", (g2, small), (g3,), 1.0)),
        2, inputs=(0,), output_grads=(g0,), input_grads=(g3,)).verify()
    early = BlockProgram(graph, EXACT).solve(13, 0).option
    assert early is not None
    assert early.backward == (0, 1, 2, 3, 4)
