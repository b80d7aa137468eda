"""How operations are written: as calls that reach the same overload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rkmate.codegen.printer import print_slice
from rkmate.codegen.slices import Free, Look, Run, Slice
from rkmate.codegen.spelling import spelling
from rkmate.errors import GraphError
from rkmate.ir.calls import Call, Constant, Method, Name
from tests.semantics.steps import planned

aten = torch.ops.aten
X, ROW, NONE = torch.zeros(4, 4), torch.zeros(4), torch.zeros(())


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("target", "args", "how"), [
    (aten.mm.default, (X, X), "method"), (aten.add.Tensor, (X, 2), "method"),
    (aten.mul_.Scalar, (X, 2.0), "method"), (aten.sum.dim_IntList, (X, [0], True), "method"),
    (aten.addmm.default, (ROW, X, X), "torch"), (aten.where.self, (X > 0, X, X), "torch"),
    (aten.native_layer_norm.default, (X, [4], ROW, ROW, 1e-5), "torch"),
    # No function of its own, and an operator made of others.
    (aten.threshold_backward.default, (X, X, 0), ""), (aten.linear.default, (X, X), ""),
    (aten._to_copy.default, (X,), "")])
def test_it_is_the_quickest_that_reaches_the_overload(target: Any, args: tuple[Any, ...], how: str) -> None:
    assert spelling(target, args, {}) == how


def test_a_number_is_no_tensor() -> None:
    """Which overload a method means depends on its arguments: each kind is tried."""
    assert spelling(aten.pow.Tensor_Scalar, (X, 2), {}) == "method"
    assert spelling(aten.pow.Tensor_Tensor, (X, NONE), {}) == "method"
    assert spelling(aten.mul.Tensor, (X, NONE), {}) == "method"


def test_a_step_runs_the_operations_of_its_trace() -> None:
    """Beside views and copies, which a step spells as methods."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    module = planned(model, x)
    with _Names() as names:
        module(x).sum().backward()
    assert {"aten.addmm.default", "aten.native_layer_norm.default", "aten.gelu.default",
            "aten.native_layer_norm_backward.default", "aten.mm.default"} <= {*names.found}
    assert "aten.addmm" not in module.source and module.source.count("torch.addmm") == 1


def test_a_view_that_is_read_twice_has_a_name() -> None:
    part = Slice("f", ("x",), (), (), (
        Look("x_t", Call(Method("t"), (Name("x"),)), "x"),
        Run(Call(Method("mm"), (Name("x_t"), Name("x"))), ("mm",)),
        Run(Call(Method("mul_"), (Name("x_t"), Constant("2"))), ("mul",), over="x"),
        Free(("x",), 0, ("x_t",))), ("mm", "mul"))
    text = print_slice(part.verify(), "f")
    assert "x_t = x.t()\n" in text and "del x, x_t" in text
    with pytest.raises(GraphError, match="without its views"):
        Slice("f", ("x",), (), (), (*part.body[:2], Free(("x",), 0)), ("mm",)).verify()


def test_views_of_a_step_are_made_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight.t()
            return torch.tanh(torch.tanh(x @ w) @ w) @ w

    source = planned(Twice(), torch.randn(3, 4)).source
    assert source.count("weight.t()") == 1
