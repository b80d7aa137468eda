"""Where a graph is cut, and what may be set about it."""

from __future__ import annotations

import pytest

from rkmate.errors import ArgumentError
from rkmate.graph.blocks.cut import CutSettings, cut
from rkmate.ir.cd import CDGraph, CNode, DNode


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
