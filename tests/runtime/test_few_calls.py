"""What a step spares the host: autograd's kernels, and an operation for each counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.semantics.steps import planned

X, Y = torch.randn(4, 6), torch.randn(4, 6)


class _With(nn.Module):
    """A layer, and a function of what it makes."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(("function", "operator", "below"), [
    (torch.tanh, "", True),
    (lambda h: F.mse_loss(h, Y), "rkmate.mse_loss", True),
    (lambda h: h.prod(1), "rkmate.product_backward", False)])
def test_operations_without_autograd_inside_run_below_it(
        function: Callable[[torch.Tensor], torch.Tensor], operator: str, below: bool) -> None:
    model = _With(function)
    wrapped = planned(model, X)
    latest = wrapped._latest
    assert latest is not None and operator in wrapped.source
    assert latest.compiled.generated.below_autograd == below
    model(X).sum().backward()
    assert model.layer.weight.grad is not None
    expected, model.layer.weight.grad = model.layer.weight.grad, None
    wrapped(X).sum().backward()
    assert torch.equal(model.layer.weight.grad, expected)


class _Norms(nn.Module):
    """Batch norms in a row; their output, and what comes before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for norm in self.norms:
            before, x = x, norm(x).relu()
        return {"last": x, "before": before}


def test_batch_norms_count_in_one_call_once_a_step() -> None:
    model = _Norms()
    wrapped = planned(model, X, trains="last")
    assert wrapped.source.count("env.count(") == 1 and ".add(1)" not in wrapped.source
    for _ in range(2):
        wrapped(X)["last"].sum().backward()
    out = wrapped(X)
    out["last"].sum().backward(retain_graph=True)
    with pytest.warns(rkmate.RkmateWarning, match="runs a second time"):
        out["before"].sum().backward()                     # by another forward, which counts nothing
    assert [int(n.num_batches_tracked) for n in model.norms] == [3] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("function", "operator", "noted"), [
    (lambda h: F.mse_loss(h, Y), "mse_loss_backward", False),
    (lambda h: h.prod(1), "product_backward", True)])
def test_values_of_the_step_are_made_without_notes(
        function: Callable[[torch.Tensor], torch.Tensor], operator: str, noted: bool) -> None:
    wrapped = planned(_With(function), X)
    latest = wrapped._latest
    assert latest is not None
    names = latest.compiled._forward.__globals__
    called, = (name for name in names if operator in name)
    seen, quick = [], names[called]

    def recorded(*args: Any) -> Any:
        seen.append(not torch._C._dispatch_tls_is_dispatch_key_excluded("ADInplaceOrView"))
        return quick(*args)

    names[called] = recorded
    wrapped(X).sum().backward()
    assert seen == [noted]


def test_what_others_see_is_written_with_notes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Flatten(0))
    wrapped = planned(model, X, gradients="in_place")
    wrapped(X).sum().backward()
    seen = [model[1].running_mean, model[1].num_batches_tracked, *(p.grad for p in model.parameters())]
    before = [t._version for t in seen]
    out = wrapped(X)
    out.sum().backward()
    assert all(t._version > v for t, v in zip(seen, before, strict=True))
    again = wrapped(X)
    with torch.no_grad():
        again.mul_(2)
    with pytest.raises(rkmate.BackwardError, match="changed in place after the forward"):
        again.sum().backward()
