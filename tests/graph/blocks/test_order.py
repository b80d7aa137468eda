"""Orders of a block's nodes by hand; `test_order_in_models.py` has those of captured models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.blocks.order import better_order, reordered
from rkmate.graph.blocks.partition import cut_stages, partition
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.schedule import from_order, save_all
from rkmate.ir.simulate import simulate
from tests.graph.blocks.graphs import chain, program_of, settings, trained
from tests.ir.graphs import graphs


def peak(graph: CDGraph, order: Sequence[int] | None = None) -> int:
    return simulate(graph, from_order(graph, order or range(len(graph.c)), graph.loss)).peak


def product(size: int) -> CDGraph:
    """A wide value `h` of a product: its backward makes the input's gradient first, then the weight's,
    which alone still reads `h`."""
    d = (DNode("x", 0), DNode("h", size), DNode("y", 1), DNode("dy", 1, "grad"), DNode("dh", size, "grad"),
         DNode("dw", 1, "grad"), DNode("dx", 1, "grad"))
    c = (CNode("widen", "forward", (0,), (1,)), CNode("narrow", "forward", (1,), (2,)),
         CNode("input", "backward", (3,), (4,)), CNode("weight", "backward", (3, 1), (5,)),
         CNode("before", "backward", (4,), (6,)))
    return CDGraph(d, c, 2, (0,), (2,), (3,), (6,), {5: 4}).verify()


def test_what_lets_a_large_value_go_runs_first() -> None:
    graph = product(100)
    order = better_order(graph)
    assert order == [0, 1, 3, 2, 4]
    assert peak(graph) > 200 > 110 > peak(graph, order)


def test_what_stays_in_its_order() -> None:
    graph = product(100)
    assert better_order(graph, chained=[(2, 3)]) == [0, 1, 2, 3, 4]
    assert better_order(graph, groups=[(0, 1), (2,), (3, 4)]) == [0, 1, 2, 3, 4]
    assert better_order(graph, groups=[(0, 1), (2, 3), (4,)]) == [0, 1, 3, 2, 4]
    drawn = replace(graph, c=tuple(replace(c, random=c.name in ("input", "weight")) for c in graph.c))
    assert better_order(drawn) == [0, 1, 2, 3, 4]          # of two that draw, the first draws first


def test_a_graph_that_has_no_better_order_stays() -> None:
    assert better_order(product(0)) == [0, 1, 2, 3, 4]
    graph = trained(chain(8))
    assert better_order(graph) == list(range(16))


@given(graphs(most=10), st.data())
def test_groups_and_chains_of_any_graph(graph: CDGraph, data: st.DataObject) -> None:
    n = len(graph.c)
    chained = [sorted(c) for c in data.draw(st.lists(st.sets(st.integers(0, n - 1), min_size=2), max_size=2))]
    edges = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3)) | {0, graph.loss, n})
    groups = [tuple(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    order = better_order(graph, chained, groups)
    place = {i: k for k, i in enumerate(order)}
    assert sorted(order) == list(range(n))
    assert order[:graph.loss] == [i for i in order if i < graph.loss]
    for c in chained:
        assert [place[i] for i in c] == sorted(place[i] for i in c)
    for before, after in zip(groups, groups[1:], strict=False):
        assert max(place[i] for i in before) < min(place[i] for i in after)
    simulate(graph, from_order(graph, order, graph.loss))         # it can run


@examples(max_examples=40)
@given(graphs(most=14), settings())
def test_a_step_never_needs_more(cd: CDGraph, how: CutSettings) -> None:
    parts = partition(program_of(cd), how)
    new = reordered(parts)
    before, after = parts.program.cd, new.program.cd
    assert simulate(after, save_all(after)).peak <= simulate(before, save_all(before)).peak
    assert new.block_of == parts.block_of
    assert sorted(c.name for c in after.c) == sorted(c.name for c in before.c)


@examples(max_examples=40)
@given(graphs(most=14), settings())
def test_stages_stay_together(cd: CDGraph, how: CutSettings) -> None:
    parts = partition(program_of(cd), how)
    names = [str(i // 3) for i in range(cd.loss)] + [None] * cd.loss
    stages = cut_stages(parts.program, names)
    stage = {parts.program.cd.c[i].name: b.index for b in stages.blocks for i in b.c}
    new = reordered(parts, stages.blocks)
    for block in new.blocks:
        for phase in (block.graph.forward, block.graph.backward):
            met = [stage[block.graph.c[i].name] for i in phase]
            before = [stage[parts.blocks[block.index].graph.c[i].name] for i in phase]
            assert [s for k, s in enumerate(met) if k == 0 or met[k - 1] != s] == \
                [s for k, s in enumerate(before) if k == 0 or before[k - 1] != s]


def test_gradients_of_one_parameter_are_made_in_their_order() -> None:
    cd = trained(chain(8), [1, 3, 5, 3, 1, 7, 1, 3], [True] * 8)
    shared = sorted(cd.releases)[::2]
    parts = partition(program_of(cd, of_one_parameter=[shared]), CutSettings(8, 45))
    makers = [cd.c[cd.producer[j] or 0].name for j in shared]
    names = [c.name for c in reordered(parts).program.cd.c]
    assert [n for n in names if n in makers] == makers


def test_equal_blocks_are_put_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cd = trained(chain(24), [1, 3] * 12, [True] * 24)
    parts = partition(program_of(cd), CutSettings(4, 4))
    asked: list[CDGraph] = []
    monkeypatch.setattr("rkmate.graph.blocks.order.better_order",
                        lambda graph, *how: [asked.append(graph), *better_order(graph, *how)][1:])
    reordered(parts)
    assert len(parts.blocks) >= 6 and len(asked) <= 3      # the first, the last, and those in between
