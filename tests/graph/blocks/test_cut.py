"""Where a graph is cut, and which block each node falls into."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkmate.errors import ArgumentError
from rkmate.graph.blocks.cut import Blocks, CutSettings, cut
from rkmate.ir.cd import HOISTED, CDGraph, CNode, DNode
from tests.graph.blocks.graphs import chain, origins, settings, trained
from tests.ir.graphs import graphs


def cut_of(cd: CDGraph, how: CutSettings = CutSettings(), constant: Sequence[int] = (),
           pinned: Sequence[int] | None = None, stages: Sequence[str | None] | None = None,
           *, origin: bool = True) -> Blocks:
    return cut(cd, frozenset(constant), origins(cd) if origin else [None] * len(cd.c),
               cd.outputs if pinned is None else pinned, how, stages)


def alive_after(cd: CDGraph, p: int, pinned: Sequence[int]) -> list[int]:
    """Forward storages of size made at or before `p` and read by the forward after it."""
    return [j for j in range(len(cd.d)) if (made := cd.producer[j]) is not None and made <= p
            and j not in pinned and cd.d[j].size
            and any(p < r < cd.loss for r in cd.readers[j])]


# -- known cuts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "least", "lengths"), [
    (12, 4, [4, 4, 4]), (14, 4, [4, 4, 6]), (7, 4, [7]), (5, 1, [1] * 5), (3, 2, [3])])
def test_a_row_of_nodes(n: int, least: int, lengths: list[int]) -> None:
    found = cut_of(trained(chain(n)), CutSettings(least, 45))
    assert [found.of[:n].count(b) for b in range(found.count)] == lengths
    assert found.separators == found.count - 1
    assert found.of[n:] == found.of[:n][::-1]            # each backward node with its forward node


def layers(count: int) -> list[list[int]]:
    """Residual layers of four nodes after a first one: the sum is the only way on."""
    reads: list[list[int]] = [[]]
    for _ in range(count):
        x = len(reads) - 1
        reads += [[x], [x + 1], [x + 2], [x, x + 3]]
    return reads


def test_residual_layers_are_cut_between() -> None:
    found = cut_of(trained(layers(5)), CutSettings(4, 45))
    assert found.of[:21] == (0, 0, 0, 0, 0, *(b for b in range(1, 5) for _ in range(4)))
    assert (found.count, found.separators) == (5, 4)


def two_lanes(n: int) -> list[list[int]]:
    """Two rows side by side that meet at the end: no storage is ever alone."""
    return [[], [0], *([i - 2] for i in range(2, 2 * n)), [2 * n - 2, 2 * n - 1]]


def test_without_separators_the_narrowest_places() -> None:
    reads = two_lanes(10)
    sizes = [10] * len(reads)
    sizes[8] = sizes[9] = sizes[14] = sizes[15] = 1
    found = cut_of(trained(reads, sizes), CutSettings(4, 12))
    assert found.separators == 0
    assert [found.of.index(b) for b in range(found.count)] == [0, 10, 16]


def test_a_stretch_that_is_short_enough_stays_whole() -> None:
    reads = two_lanes(10)
    assert cut_of(trained(reads), CutSettings(4, len(reads))).count == 1
    assert cut_of(trained(reads), CutSettings(4, len(reads) - 1)).count > 1


def test_pinned_and_empty_storages_are_free_to_cross() -> None:
    # Node 0 is read by all others.
    reads = [[], *([0, i - 1] for i in range(1, 12))]
    assert cut_of(trained(reads), CutSettings(4, 45)).count == 1
    assert cut_of(trained(reads), CutSettings(4, 45), pinned=(1,)).separators == 2
    assert cut_of(trained(reads, [0, *[1] * 11]), CutSettings(4, 45)).separators == 2


# -- the backward -------------------------------------------------------------------------


def graph(c: Sequence[tuple[Sequence[int], Sequence[int]]], loss: int, size: int,
          **more: Sequence[int]) -> CDGraph:
    """C nodes as (inputs, outputs), D node 0 from outside."""
    nodes = tuple(CNode(f"c{i}", "forward" if i < loss else "backward", tuple(a), tuple(b))
                  for i, (a, b) in enumerate(c))
    return CDGraph(tuple(DNode(f"d{j}", 1) for j in range(size)), nodes, loss, (0,),
                   **{k: tuple(v) for k, v in more.items()}).verify()


def test_a_backward_node_that_reads_two_blocks_joins_them() -> None:
    # Forward d0 -> d1 -> ... -> d6, and a backward node that reads d1 and d5: in reach of no one block.
    forward = [((j,), (j + 1,)) for j in range(6)]
    cd = graph([*forward, ((1, 5, 7), (8,)), ((8, 0), (9,))], 6, 10, outputs=(6,), output_grads=(7,),
               input_grads=(9,))
    found = cut_of(cd, CutSettings(1, 45), origin=False)
    assert found.of[:7] == (0, 1, 1, 1, 1, 2, 1)              # d1 is in reach up to c1, d5 from c4 on
    without = graph([*forward, ((5, 7), (8,)), ((8, 0), (9,))], 6, 10, outputs=(6,), output_grads=(7,),
                    input_grads=(9,))
    assert cut_of(without, CutSettings(1, 45), origin=False).count == 6


def test_a_backward_node_that_reads_nothing_of_the_forward_is_with_its_readers() -> None:
    forward = [((j,), (j + 1,)) for j in range(4)]
    # c4 makes zeros from nothing; c5 reads them and d1, in block 0 or 1.
    cd = graph([*forward, ((), (6,)), ((5, 6, 1), (7,))], 4, 8, outputs=(4,), output_grads=(5,),
               input_grads=(7,))
    found = cut_of(cd, CutSettings(1, 45), origin=False)
    assert found.count == 4
    assert found.of[4] == found.of[5] == 1


# -- constants ----------------------------------------------------------------------------


@pytest.mark.parametrize(("readers", "where"), [
    ((2,), 0), ((5,), 1), ((4, 5), 1), ((2, 5), HOISTED), ((7,), HOISTED), ((2, 7), HOISTED), ((6, 7), 1)])
def test_constants_join_their_only_block(readers: Sequence[int], where: int) -> None:
    # c0 makes a mask (d1) from nothing; c1 .. c6 are a row, two blocks of three; c7 is of the last.
    row = [((0 if i == 1 else i, *([1] if i in readers else [])), (i + 1,)) for i in range(1, 7)]
    cd = graph([((), (1,)), *row, ((8, *([1] if 7 in readers else [])), (9,))], 7, 10, outputs=(7,),
               output_grads=(8,), input_grads=(9,))
    found = cut_of(cd, CutSettings(3, 45), constant=(0,), origin=False)
    assert found.of[1:] == (0, 0, 0, 1, 1, 1, 1)
    assert found.of[0] == where
    assert cut_of(cd, CutSettings(3, 45), constant=(0,), origin=False, pinned=(1, 7)).of[0] == HOISTED


# -- stages -------------------------------------------------------------------------------


def test_cuts_between_stages_however_short() -> None:
    cd = trained(chain(6))
    found = cut_of(cd, stages=["a", None, "b", "b", "c", None] + [None] * 6)
    assert found.of[:6] == (0, 0, 1, 1, 2, 2)
    assert found.separators == 2


def test_no_cut_where_two_storages_cross_stages() -> None:
    cd = trained([[], [0], [0, 1], [2]])
    assert cut_of(cd, stages=["a", "a", "b", "c"] + [None] * 4).of[:4] == (0, 0, 0, 1)


# -- any graph ----------------------------------------------------------------------------


@given(cd=graphs(24), how=settings(), origin=st.booleans())
def test_any_graph(cd: CDGraph, how: CutSettings, *, origin: bool) -> None:
    found = cut_of(cd, how, origin=origin)
    of, n = found.of, cd.loss
    # The forward in order, in blocks that are long enough.
    assert list(of[:n]) == sorted(of[:n])
    lengths = [of[:n].count(b) for b in range(found.count)]
    assert set(of) == set(range(found.count))
    assert found.count == 1 or min(lengths) >= how.least
    # 1-separators are places with one storage alive; longer blocks have none that would do.
    edges = [p for p in range(n - 1) if of[p] != of[p + 1]]
    narrow = [p for p in edges if len(alive_after(cd, p, cd.outputs)) <= 1]
    assert found.separators <= len(narrow)
    for i in cd.backward:
        # In reach of what it reads, and run in an order from the last block to the first.
        for j in cd.c[i].inputs:
            made = cd.producer[j]
            if made is None:
                continue
            if made >= n:
                assert of[i] <= of[made]
            else:
                last = max([of[made], *(of[r] for r in cd.readers[j] if r < n)])
                assert of[made] <= of[i] and (j in cd.outputs or of[i] <= last)
        if origin:
            assert of[i] <= of[2 * n - 1 - i]


# -- settings -----------------------------------------------------------------------------


def braid(n: int) -> CDGraph:
    """Each value is read by the next two nodes: no place where one storage alone is alive."""
    d = tuple(DNode(f"v{i}", 4 + i % 3) for i in range(n))
    c = tuple(CNode(f"c{i}", "forward", tuple(range(max(0, i - 2), i)), (i,)) for i in range(n))
    return CDGraph(d, c, n, (), (n - 1,)).verify()


@pytest.mark.parametrize(("least", "most"), [(5, 1), (0, 3), (4, 0), (2.0, 5), (True, 5)])
def test_settings_that_contradict_themselves(least: int, most: int) -> None:
    with pytest.raises(ArgumentError, match=r"least|most"):
        CutSettings(least, most)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (4, 4), (5, 7), (30, 45), (4, 45), (45, 45)])
def test_every_cut_ends(least: int, most: int) -> None:
    """Blocks are as long as `least`, and no longer than `most` where both parts can be."""
    graph = braid(100)
    found = cut(graph, frozenset(), [None] * 100, (), CutSettings(least, most))
    lengths = [found.of.count(b) for b in range(found.count)]
    assert sum(lengths) == 100 and min(lengths) >= least
    assert max(lengths) <= max(most, 2 * least - 1)
