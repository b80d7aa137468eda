"""Gradients of parameters that are added in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from rkmate.errors import GraphError, ScheduleError
from rkmate.graph.blocks.lower import lower
from rkmate.graph.capture.captured import Source
from rkmate.graph.passes.cleanup import drop_dead
from rkmate.graph.passes.gradients import add_gradients_in_place
from rkmate.graph.passes.joint import Joint, adds
from rkmate.graph.passes.verify import verify
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.schedule import Compute, Loss, Schedule
from rkmate.ir.simulate import simulate
from tests.graph.passes.graphs import Made, aten

own = torch.ops.rkmate


class Step(Made):
    """A graph whose output is read from an input, and some gradients of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.g = self.source("input", 0, 6, 4), self.source("tangent", 0, 6, 3)

    def rewritten(self, *grads: tuple[str, fx.Node]) -> Joint:
        y = self.call(aten.neg.default, self.x)
        last = list(self.graph.nodes)
        first = next(n for n in last if n.op == "call_function")
        if first is not y:
            first.prepend(y)
        of = {s.key: n for n, s in self.sources.items() if s.kind == "param"}
        return added(self.work([y], [(of[name], node) for name, node in grads]))


def added(work: Joint) -> Joint:
    add_gradients_in_place(work)
    drop_dead(work)
    return verify(work)


def calls(work: Joint) -> list[Any]:
    return [n.target for n in work.graph.nodes if adds(n)]


def test_a_product_is_added_through_its_views() -> None:
    made = Step()
    made.source("param", "w", 4, 3)
    t = made.call(aten.t.default, made.g, backward=True)
    product = made.call(aten.mm.default, t, made.x, backward=True)
    work = made.rewritten(("w", made.call(aten.t.default, product, backward=True)))
    assert calls(work) == [aten.addmm_.default] and not work.grads
    place = next(n for n in work.graph.nodes if adds(n)).args[0]
    assert place.target is aten.t.default and work.sources[place.args[0]] == Source("grad", "w")


def test_a_product_that_something_else_reads_is_a_tensor() -> None:
    made = Step()
    made.source("param", "w", 3, 4)
    t = made.call(aten.t.default, made.g, backward=True)
    product = made.call(aten.mm.default, t, made.x, backward=True)
    other = made.source("param", "v", 3, 4)
    again = made.call(aten.mul.Tensor, product, other, backward=True)
    work = made.rewritten(("w", product), ("v", again))
    assert calls(work) == [aten.add_.Tensor, aten.add_.Tensor]


def test_a_view_that_something_else_reads() -> None:
    made = Step()
    made.source("param", "w", 4, 3)
    other = made.source("param", "v", 4, 3)
    t = made.call(aten.t.default, made.g, backward=True)
    turned = made.call(aten.t.default, made.call(aten.mm.default, t, made.x, backward=True), backward=True)
    again = made.call(aten.mul.Tensor, turned, other, backward=True)
    assert calls(made.rewritten(("w", turned), ("v", again))) == [aten.add_.Tensor, aten.add_.Tensor]


def test_one_gradient_of_two_parameters() -> None:
    made = Step()
    for name in "wv":
        made.source("param", name, 3, 4)
    t = made.call(aten.t.default, made.g, backward=True)
    product = made.call(aten.mm.default, t, made.x, backward=True)
    assert calls(made.rewritten(("w", product), ("v", product))) == [aten.add_.Tensor] * 2


def test_a_gradient_that_arrives_is_added() -> None:
    made = Step()
    made.source("param", "w", 6, 3)
    work = made.rewritten(("w", made.g))
    assert calls(work) == [aten.add_.Tensor]
    program = lower(work)
    node = program.cd.c[-1]
    assert node.adds and node.outputs == () and node.phase == "backward" and not program.param_grads


def test_a_convolutions_input_takes_its_own_gradient() -> None:
    made = Made()
    x, g = made.source("input", 0, 2, 4, 5, 5), made.source("tangent", 0, 2, 8, 3, 3)
    w = made.source("param", "w", 8, 4, 3, 3)
    b = made.source("param", "b", 8)
    y = made.call(aten.neg.default, x)
    both = made.call(aten.convolution_backward.default, g, x, w, [8], [1, 1], [0, 0], [1, 1], False, [0, 0],
                     1, [True, True, True], backward=True)
    items = [made.item(both, k, backward=True) for k in range(3)]
    work = added(made.work([y], list(zip((x, w, b), items, strict=True))))
    assert calls(work) == [own.add_convolution_gradient.default]
    left = next(n for n in work.graph.nodes if n.target is aten.convolution_backward.default)
    assert left.args[-1] == [True, False, False] and left.meta["val"][1] is None
    assert [s.kind for s, _ in work.grads] == ["input"]


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_convolutions_gradient(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.graph.ops import products

    torch.manual_seed(0)
    monkeypatch.setattr(products, "part_bytes", lambda like, total: total // 3)
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 6, 3, 3) if transposed else torch.randn(6, 4, 3, 3)
    convolution = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    g = torch.randn_like(convolution(x, w))
    rest = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    _, of_weight, of_bias = aten.convolution_backward(g, x, w, [6], *rest, [False, True, True])
    into, into_bias = torch.ones_like(w), torch.ones(6)
    assert len(products.weight_parts(w, 1)) > 1
    own.add_convolution_gradient(into, into_bias, g, x, w, *rest)
    torch.testing.assert_close(into, of_weight + 1)
    torch.testing.assert_close(into_bias, of_bias + 1)


def _work() -> Joint:
    made = Step()
    made.source("param", "w", 6, 3)
    return made.rewritten(("w", made.g))


def test_what_verify_finds() -> None:
    work = _work()
    node = next(n for n in work.graph.nodes if adds(n))
    node.meta["partitioner_tag"] = "is_forward"
    with pytest.raises(GraphError, match=r"in the backward|of the backward"):
        verify(work)
    work = _work()
    del next(n for n in work.graph.nodes if adds(n)).meta["adds"]
    with pytest.raises(GraphError, match=r"there to be added to|nobody reads"):
        verify(work)
    work = _work()
    node = next(n for n in work.graph.nodes if adds(n))
    node.args = (node.args[1], node.args[0])
    with pytest.raises(GraphError, match="to places for gradients"):
        verify(work)


def test_an_addition_runs_once_and_in_the_backward() -> None:
    graph = CDGraph((DNode("y", 4), DNode("g", 4, "grad")), (
        CNode("y", "forward", (), (0,)), CNode("add_", "backward", (1,), (), adds=True)), 1, (), (0,), (1,))
    simulate(graph.verify(), Schedule((Compute(0), Loss(), Compute(1))))
    with pytest.raises(ScheduleError, match="a second time"):
        simulate(graph, Schedule((Compute(0), Loss(), Compute(1), Compute(1))))
    with pytest.raises(ScheduleError, match="before the loss"):
        simulate(graph, Schedule((Compute(0), Compute(1), Loss())))
    with pytest.raises(GraphError, match="and is of the forward"):
        CDGraph(graph.d, (CNode("y", "forward", (), (0,), adds=True),), 1).verify()
