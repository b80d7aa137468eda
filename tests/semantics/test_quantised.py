"""Frozen quantised layers under trained adapters: a stand-in for a library whose weights are parameters of a
class of their own, with scales in an object beside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from tests.equality import assert_same_step
from tests.models.sample import Sample
from tests.semantics.steps import planned, tightest


class _State:
    """Scales of a quantised weight, one for each row."""

    def __init__(self, scales: torch.Tensor, codes: torch.Tensor) -> None:
        self.scales, self.codes = scales, codes
        self.calls = 0


class _Packed(nn.Parameter):
    """A weight in eight bits."""

    def __new__(cls, weight: torch.Tensor) -> _Packed:
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        made: _Packed = torch.Tensor._make_subclass(cls, codes, False)
        made.state = _State(scales, codes)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packed:
        state = copy.deepcopy(self.state, memo)
        made: _Packed = torch.Tensor._make_subclass(_Packed, state.codes, False)
        made.state = state
        return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: _State) -> torch.Tensor:
        ctx.packed, ctx.state = packed, state
        return x @ (packed.to(x.dtype) * state.scales).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ (ctx.packed.to(grad.dtype) * ctx.state.scales), None, None


class _Counting(_Product):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: _State) -> torch.Tensor:
        state.calls += 1
        return _Product.forward(ctx, x, packed, state)


class _Quantised(nn.Module):
    def __init__(self, width: int, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight = _Packed(torch.randn(width, width))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.function.apply(x, self.weight, self.weight.state)
        self.weight.data = self.weight.state.codes      # which it is
        return y


class _Adapted(nn.Module):
    def __init__(self, width: int, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.base = _Quantised(width, function)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.b(self.a(x))
        return torch.tanh(y)


def _model(function: type[torch.autograd.Function] = _Product) -> nn.Module:
    return nn.Sequential(*(_Adapted(8, function) for _ in range(2)))


@pytest.mark.parametrize("wrapper", [planned, tightest])
def test_frozen_weights_with_attributes_are_planned(wrapper: Any) -> None:
    model, x = _model(), torch.randn(16, 8)
    sample = Sample(model, (x,), {}, lambda y: y.sin().sum())
    assert_same_step(copy.deepcopy(model), wrapper(model, x), sample)
    assert all(type(m.weight) is _Packed for m in model.modules() if isinstance(m, _Quantised))


def test_scales_are_read_where_they_stand() -> None:
    model, x = _model(), torch.randn(16, 8)
    module, before = planned(model, x), model(x)
    with torch.no_grad():
        model[0].base.weight.state.scales.mul_(2)
    assert torch.equal(module(x), model(x)) and not torch.equal(module(x), before)


@pytest.mark.parametrize(("change", "words"), [
    ("counts", "changes an object that it takes"), ("learns", "takes a Tensor that may hold")])
def test_objects_that_a_plan_would_not_see_are_refused(change: str, words: str) -> None:
    model = _model(_Counting if change == "counts" else _Product)
    if change == "learns":
        model[0].base.weight.state.scales.requires_grad_()
    with pytest.raises(rkmate.CaptureError, match=words):
        planned(model, torch.randn(16, 8))
