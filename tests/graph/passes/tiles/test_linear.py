"""Which operations are linear in an incoming gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from rkmate.graph.passes.tiles.region import is_linear
from tests.graph.passes.graphs import Made, aten

own = torch.ops.rkmate
Write = Callable[[Made, fx.Node, fx.Node], fx.Node]

LINEAR: dict[str, Write] = {
    "a product": lambda m, g, v: m.call(aten.mul.Tensor, v, g),
    "divided by a value": lambda m, g, v: m.call(aten.div.Tensor, g, v),
    "a matrix product": lambda m, g, v: m.call(aten.mm.default, v, g),
    "a sum of two": lambda m, g, v: m.call(aten.add.Tensor, g, g),
    "a view": lambda m, g, v: m.call(aten.t.default, g),
    "masked by zeros": lambda m, g, v: m.call(aten.masked_fill.Scalar, g, m.call(aten.gt.Scalar, v, 0), 0),
    "zeros of its shape": lambda m, g, v: m.call(aten.zeros_like.default, g),
    "a slope": lambda m, g, v: m.call(aten.tanh_backward.default, g, v),
}
OTHERS: dict[str, Write] = {
    "a square": lambda m, g, v: m.call(aten.mul.Tensor, g, g),
    "a divisor": lambda m, g, v: m.call(aten.div.Tensor, v, g),
    "a sum with a value": lambda m, g, v: m.call(aten.add.Tensor, g, v),
    "a sum with a number": lambda m, g, v: m.call(aten.add.Tensor, g, 1),
    "masked by ones": lambda m, g, v: m.call(aten.masked_fill.Scalar, g, m.call(aten.gt.Scalar, v, 0), 1),
    "where a slope is taken": lambda m, g, v: m.call(aten.tanh_backward.default, v, g),
    "clipped": lambda m, g, v: m.call(aten.clamp.default, g, -1, 1),
}


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_linear(name: str) -> None:
    made = Made()
    grad, value = made.source("tangent", 0, 4, 4), made.source("input", 0, 4, 4)
    node = (LINEAR | OTHERS)[name](made, grad, value)
    assert is_linear(node, {grad, node}) == (name in LINEAR)
