"""From small hand-made graphs to programs, and when their blocks are the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.blocks.identity import block_texts, classes_of
from rkmate.graph.blocks.lower import Program, lower
from rkmate.graph.blocks.partition import partition
from rkmate.graph.capture.captured import Source
from rkmate.graph.passes.joint import Joint

aten = torch.ops.aten


class _Graph:
    """Nodes with the values that they have."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.sources: dict[fx.Node, Source] = {}
        self.backward = False

    def source(self, kind: Any, key: str | int, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"{kind}_{len(self.sources)}")
        node.meta["val"] = torch.ones(shape)
        self.sources[node] = Source(kind, key)
        return node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=target._opname)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        if self.backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node


def _layer(name: str = "weight", width: int = 3) -> tuple[_Graph, Joint, dict[str, fx.Node]]:
    """``tanh(x @ weight)``; the input's gradient is computed from the weight's, as no model does."""
    g = _Graph()
    x, weight = g.source("input", 0, 4, 4), g.source("param", name, 4, width)
    tangent = g.source("tangent", 0, 4, width)
    mm = g(aten.mm.default, x, weight)
    tanh = g(aten.tanh.default, mm)
    g.backward = True
    back = g(aten.tanh_backward.default, tangent, tanh)
    turned = g(aten.t.default, x)
    grad = g(aten.mm.default, turned, back)
    other = g(aten.neg.default, grad)
    joint = Joint(g.graph, g.sources, (tanh,), (),
                  ((g.sources[weight], grad), (Source("input", 0), other)), (True,))
    return g, joint, {"mm": mm, "tanh": tanh, "back": back, "turned": turned, "grad": grad, "other": other}


def _donors(program: Program) -> dict[str, tuple[str, ...]]:
    return {c.name: tuple(program.cd.d[j].name for j in c.donors) for c in program.cd.c}


def test_views_are_no_nodes() -> None:
    _, joint, nodes = _layer()
    program = lower(joint)
    assert [c.name for c in program.cd.c] == ["mm", "tanh", "tanh_backward", "mm_1", "neg"]
    assert program.cd.loss == 2
    assert program.storage[nodes["turned"]] == Source("input", 0)
    assert [d.name for d in program.cd.d] == ["grad_output_0", "mm", "tanh", "tanh_backward", "mm_1", "neg"]
    assert [d.size for d in program.cd.d] == [48] * 6
    assert program.pinned == (2,)


def test_what_may_be_overwritten() -> None:
    """Not the gradient that the caller gives, and not one that autograd is given."""
    _, joint, nodes = _layer()
    program = lower(joint)
    assert _donors(program) == {"mm": (), "tanh": ("mm",), "tanh_backward": (), "mm_1": (), "neg": ()}
    way, = program.in_place[nodes["tanh"]].values()
    assert way.target is aten.tanh_.default
    assert not program.alternatives


def test_a_sum_may_be_written_over_either() -> None:
    g = _Graph()
    x = g.source("input", 0, 2, 2)
    one, two = g(aten.sin.default, x), g(aten.cos.default, x)
    total = g(aten.add.Tensor, one, two)
    program = lower(Joint(g.graph, g.sources, (total,), wanted=(True,)))
    ways = program.in_place[total]
    assert [(w.argument, w.swapped) for w in ways.values()] == [(0, False), (1, True)]
    assert program.cd.c[2].donors == tuple(ways) == (program.storage[one], program.storage[two])


def test_the_other_kernel_of_what_works_part_by_part() -> None:
    g = _Graph()
    grad, x = g.source("input", 0, 2, 3, 4), g.source("input", 1, 2, 3, 4)
    vectors = [g.source("input", k, 3) for k in (2, 3, 4)]
    node = g(torch.ops.rkmate.batch_norm_backward.default, grad, x, *vectors, 1e-5)
    first = g.graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = node.meta["val"][0]
    program = lower(Joint(g.graph, g.sources, (first,), wanted=(True,)))
    other, = program.alternatives[node]
    assert other.target is aten.native_batch_norm_backward.default
    assert other.overhead == 2 * 3 * 4 * 4


def test_blocks_are_the_same_whatever_their_parameters_are_called() -> None:
    texts = []
    for name, width in (("weight", 3), ("mm", 3), ("weight", 5)):
        parts = partition(lower(_layer(name, width)[1]))
        texts.append("\n".join(block_texts(parts)))
    assert classes_of(texts) == (0, 0, 1)
    assert "$0: input" in texts[0]
    assert "mm = aten.mm.default($0, $1)" in texts[0]
    assert source_key(Source("param", "a.b")) == "param:a.b"
