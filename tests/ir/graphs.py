"""Small training graphs, drawn at random or made by hand. No torch."""

from __future__ import annotations

from hypothesis import strategies as st

from rkmate.ir.cd import CDGraph, CNode, DNode
from tests.planners.problems import training_graph


def line(length: int = 3, size: int = 10) -> CDGraph:
    """Forward nodes in a row, all of one size and one second; backward i reads the input of forward i."""
    d = [DNode("x", 0), *(DNode(f"v{i}", size) for i in range(length)),
         *(DNode(f"g{i}", size, "grad") for i in range(length + 1))]
    first = 1 + length
    c = [CNode(f"f{i}", "forward", (i,), (i + 1,), 1.0) for i in range(length)]
    c += [CNode(f"b{i}", "backward", (i, first + i + 1), (first + i,), 2.0)
          for i in range(length - 1, -1, -1)]
    return CDGraph(tuple(d), tuple(c), length, (0,), (length,), (first + length,), (first,)).verify()


@st.composite
def graphs(draw: st.DrawFn, most: int = 5) -> CDGraph:
    """Training graphs of up to so many forward nodes."""
    n = draw(st.integers(2, most))
    reads = [[], *(sorted(draw(st.sets(st.integers(max(0, i - 3), i - 1), min_size=1, max_size=2)))
                   for i in range(1, n))]

    def numbers(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    return training_graph(reads, numbers(1, 6), numbers(1, 5), numbers(0, 3), numbers(0, 2),
                          draw(st.lists(st.booleans(), min_size=n, max_size=n)))


@st.composite
def orders(draw: st.DrawFn, most: int = 5) -> tuple[CDGraph, list[int]]:
    """A graph, and an order of all its nodes in which forward nodes run again here and there."""
    graph = draw(graphs(most))
    order: list[int] = []
    for i in range(len(graph.c)):
        earlier = range(min(i, graph.loss))
        order += sorted(draw(st.sets(st.sampled_from(earlier), max_size=3))) if earlier else []
        order.append(i)
    return graph, order
