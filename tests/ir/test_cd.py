"""`CDGraph.verify` says what is wrong; costs are put in by order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkmate.errors import GraphError
from rkmate.ir.cd import CDGraph, CNode, Cost, DNode
from tests.ir.graphs import line


def with_node(graph: CDGraph, i: int, **fields: object) -> CDGraph:
    nodes = list(graph.c)
    nodes[i] = replace(nodes[i], **fields)  # type: ignore[arg-type]
    return replace(graph, c=tuple(nodes))


def test_a_good_graph_is_returned_itself() -> None:
    graph = line()
    assert graph.verify() is graph


@pytest.mark.parametrize(("broken", "message"), [
    (with_node(line(), 0, phase="backward"), "f0: a backward node on the wrong side of the loss"),
    (with_node(line(), 5, phase="forward"), "b0: a forward node on the wrong side of the loss"),
    (with_node(line(), 0, inputs=(2,)), "f0 reads v1 before anything creates it"),
    (with_node(line(), 1, inputs=(7,)), "f1 reads the gradient g3 in the forward"),
    (with_node(line(), 1, outputs=(1,)), "v0 has two producers"),
    (with_node(line(), 0, outputs=(0,)), "x has two producers"),
    (replace(line(), d=(*line().d, DNode("lost", 1)), outputs=(8,)), "lost leaves the graph"),
    (replace(line(), releases={4: 3}), "g0 leaves before it is made"),
])
def test_what_is_broken_is_named(broken: CDGraph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        broken.verify()


def test_producers_and_readers() -> None:
    graph = line(2)
    assert graph.producer == (None, 0, 1, 3, 2, None)
    assert graph.readers == ((0, 3), (1, 2), (), (), (3,), (2,))
    assert list(graph.forward) == [0, 1] and list(graph.backward) == [2, 3]
    assert graph.bytes([0, 1, 2]) == 20


def test_costs_are_put_in_by_order() -> None:
    graph = line(1).with_costs([Cost(0.5, 7), Cost(0.25, 0)])
    assert [(c.time, c.overhead) for c in graph.c] == [(0.5, 7), (0.25, 0)]
    assert graph.d == line(1).d
    with pytest.raises(ValueError, match="shorter"):
        line(1).with_costs([Cost(0.5, 7)])


def test_nodes_are_values() -> None:
    assert CNode("a", "forward", (0,), (1,)) == CNode("a", "forward", (0,), (1,))
