"""Memory that no schedule does without."""

from __future__ import annotations

from hypothesis import given, settings

from rkmate.ir.cd import CDGraph, CNode, Cost, DNode
from rkmate.ir.gradients import least_memory
from rkmate.ir.schedule import from_order
from rkmate.ir.simulate import simulate
from tests.ir.graphs import graphs, line, orders


@settings(max_examples=100, deadline=None)
@given(orders())
def test_no_schedule_takes_less(drawn: tuple[CDGraph, list[int]]) -> None:
    graph, order = drawn
    assert least_memory(graph) <= simulate(graph, from_order(graph, order, order.index(graph.loss))).peak


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_with_less_temporary_memory_it_is_no_larger(graph: CDGraph) -> None:
    none = graph.with_costs(Cost(c.time, 0) for c in graph.c)
    assert least_memory(none) <= least_memory(graph)


def test_of_a_line() -> None:
    """A gradient, the next one, and what the formula reads."""
    assert least_memory(line(3)) == 30


def test_a_result_may_take_the_place_of_a_value_that_is_made_again() -> None:
    """The first backward node writes over a value that the second one reads: it is made anew between them."""
    d = (DNode("x", 0), DNode("v", 10), DNode("y", 1), DNode("gy", 1, "grad"), DNode("a", 10, "grad"),
         DNode("b", 1, "grad"))
    c = (CNode("f", "forward", (0,), (1,)), CNode("h", "forward", (1,), (2,)),
         CNode("p", "backward", (1, 3), (4,), donors=(1,)), CNode("q", "backward", (1, 4), (5,)))
    graph = CDGraph(d, c, 2, (0,), (2,), (3,), (5,)).verify()
    assert least_memory(graph) == 21            # while q runs: v, a and b
    small = CDGraph((*d[:4], DNode("a", 2, "grad"), d[5]), (*c[:2], CNode(
        "p", "backward", (1, 3), (4,)), c[3]), 2, (0,), (2,), (3,), (5,)).verify()
    assert least_memory(small) == 13 == simulate(small, from_order(small, [0, 1, 2, 0, 3], 2)).peak
