"""Gradients that a model defines itself: its own backward runs, whatever its forward computes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionMeta
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rkmate
from tests.equality import assert_same_step
from tests.models.sample import Sample
from tests.semantics.steps import Reversed, planned, tightest


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].abs().lt(3)


class _TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * 2, grad * x


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.relu_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (ctx.saved_tensors[0] > 0) * 5


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight * 2, grad.t() @ x * 0.5


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mask = (torch.rand_like(x) > 0.5).float()
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.mask * 2


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class _RoundedRow(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0].abs().lt(3)


class _RunsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


reverse = Reversed.apply                   # a name of its own, as libraries have


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.kind, self.table = kind, torch.randn(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(getattr(self, self.kind)(self.a(x), x).tanh())  # type: ignore[no-any-return]

    def reversed(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return reverse(h, 2.0) + Reversed.apply(h, 0.5)  # type: ignore[no-any-return]

    def rounded(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(h * 3)  # type: ignore[no-any-return]

    def mapped(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(_RoundedRow.apply)(h * 3)  # type: ignore[no-any-return]

    def two_results(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        product, total = _TwoResults.apply(h, self.b(x))
        return product + total  # type: ignore[no-any-return]

    def in_place(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = h * 1
        _InPlace.apply(h)
        return h

    def weighted(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _Weighted.apply(h, self.a.weight)  # type: ignore[no-any-return]

    def masked(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _Masked.apply(h)  # type: ignore[no-any-return]

    def unchanged(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _Unchanged.apply(h) * h  # type: ignore[no-any-return]

    def constant(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = _Weighted.apply(h, torch.tensor([[0.5, 1, 2, 3, 4, 5, 6, 7]] * 8))
        return _Weighted.apply(first, self.table)  # type: ignore[no-any-return]

    def without_gradient(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = _Rounded.apply(h * 3)
        return h * scale  # type: ignore[no-any-return]

    def mixed_precision(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return reverse(_Rounded.apply(self.c(h)), 2.0).float()  # type: ignore[no-any-return]

    def without_reentrance(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for k in range(2):
            h = checkpoint(lambda v, k: _TwoResults.apply(_Rounded.apply(self.c(v)), v + k)[0], h, k,
                           use_reentrant=False)
        return h

    def checkpointed_without_gradient(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        fixed = checkpoint(lambda v: _Rounded.apply(self.c(v)), x, use_reentrant=True)
        return h * fixed  # type: ignore[no-any-return]

    def called_directly(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        product, _ = _TwoResults.forward(h, self.b(x))
        return product * _Unchanged.forward(None, h)

    def checkpointed(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h + checkpoint(lambda v: F.dropout(self.c(v).tanh(), 0.3), h, use_reentrant=True)

    def module_inside(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _RunsModule.apply(self.b, h)  # type: ignore[no-any-return]

    def hooked(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 3)
        return h

    def data(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * h.data

    def clipped(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return h


KINDS = ("reversed", "rounded", "mapped", "two_results", "in_place", "weighted", "masked", "unchanged",
         "constant", "without_gradient", "mixed_precision", "without_reentrance",
         "checkpointed_without_gradient",
         "called_directly", "checkpointed", "data")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("wrapper", [planned, tightest])
@pytest.mark.parametrize("kind", KINDS)
def test_the_functions_own_backward_runs(kind: str, wrapper: Any) -> None:
    model, x = _Model(kind), torch.randn(4, 8)
    sample = Sample(model, (x,), {}, lambda y: y.sin().sum())
    twin = copy.deepcopy(model)
    assert_same_step(twin, wrapper(model, x), sample)


@pytest.mark.parametrize("kind", ["rounded", "module_inside"])
def test_calls_of_other_code_are_as_before(kind: str) -> None:
    before = FunctionMeta.__getattribute__
    with nullcontext() if kind == "rounded" else pytest.raises(rkmate.CaptureError):
        planned(_Model(kind), torch.randn(4, 8))
    assert FunctionMeta.__getattribute__ is before
    x = torch.ones(3, requires_grad=True)
    reverse(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), -2.0))


@pytest.mark.parametrize(("kind", "words"), [
    ("module_inside", "_RunsModule takes a Linear"), ("hooked", "registers a gradient hook"),
    ("clipped", "changes the parameter 'a.weight' in place")])
def test_what_a_trace_would_lose_is_refused(kind: str, words: str) -> None:
    with pytest.raises(rkmate.CaptureError, match=words):
        planned(_Model(kind), torch.randn(4, 8))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_loss_that_gives_no_gradient(outputs: int) -> None:
    """As in eager mode, no parameter gets one; the next step is as planned."""
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = torch.tanh(self.layer(x))
            return y if outputs == 1 else (y, torch.sin(y))

    model, x = Model(), torch.randn(3, 4, requires_grad=True)
    module = planned(copy.deepcopy(model), x)
    for step in (model, module):
        results = step(x)
        results = (results,) if outputs == 1 else results
        sum(_NoGradient.apply(r).sum() for r in results).backward()
        assert x.grad is None
        assert all(p.grad is None for p in step.parameters())
    assert_same_step(model, module, Sample(
        model, (x.detach(),), {}, lambda y: sum((r * r).sum() for r in (y if outputs == 2 else (y,)))))


@torch.library.custom_op("rkmate_tests::add_columns_", mutates_args=("total", "calls"))
def _add_columns(x: torch.Tensor, total: torch.Tensor, calls: torch.Tensor, by: int = 1) -> torch.Tensor:
    total.add_(x.sum(0))
    calls.add_(by)
    return x.mean(0)


@_add_columns.register_fake
def _(x: torch.Tensor, total: torch.Tensor, calls: torch.Tensor, by: int = 1) -> torch.Tensor:
    return x.new_empty(x.shape[1:])


class Columns(nn.Module):
    """Calls a custom operator that writes to a buffer, and to a part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.tanh(x) + _add_columns(x.detach(), self.total, self.calls[1], by=k + 1)
        return x


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("wrapper", [planned, tightest])
def test_a_custom_operator_that_writes_to_buffers(wrapper: Any) -> None:
    torch.manual_seed(0)
    model, x = Columns(), torch.randn(16, 8)
    module = wrapper(copy.deepcopy(model), x)
    assert_same_step(model, module, Sample(model, (x,), {}, lambda y: (y * y).sum()))
