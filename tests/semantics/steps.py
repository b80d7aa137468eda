"""What the semantic tests share: a quick wrap, and one step held against the original's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import rkmate
from rkmate.runtime.segments import Call
from tests.capturing import captured_once
from tests.options import options_of

Loss = Callable[[Callable[..., Any]], torch.Tensor]
"""Runs a module (its argument) and returns the loss."""


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned around and scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.scale * grad, None


def planned(model: nn.Module, *args: Any, budget: int | float | str = 1.0,
            kwargs: dict[str, Any] | None = None, **options: Any) -> rkmate.PlannedModule:
    """A wrapped module, planned on deterministic costs unless `options` say otherwise."""
    return rkmate.wrap(model, args, kwargs, budget=budget, progress=False,
                       **options_of(**{"costs": "analytic", **options}))


def tightest(model: nn.Module, *args: Any, kwargs: dict[str, Any] | None = None,
             **options: Any) -> rkmate.PlannedModule:
    """The wrapped module at the smallest budget that it can be trained in."""
    with captured_once():
        try:
            return planned(model, *args, budget=1, kwargs=kwargs, **options)
        except rkmate.InfeasibleBudget as error:
            return planned(model, *args, budget=error.minimum_bytes, kwargs=kwargs, **options)


def three_budgets(model: nn.Module, *args: Any, **options: Any) -> list[rkmate.PlannedModule]:
    """Wrapped at its own peak, half-way down, and at the smallest budget."""
    with captured_once():
        most, least = planned(model, *args, **options), tightest(model, *args, **options)
        middle = (most.plan.peak_bytes + least.plan.peak_bytes) // 2
        return [most, planned(model, *args, budget=middle, **options), least]


@contextmanager
def noting_segments(events: list[str]) -> Iterator[None]:
    """Append "segment" whenever a segment of a backward begins."""
    run = Call.run

    def noted(call: Call, *args: Any) -> Any:
        events.append("segment")
        return run(call, *args)

    with mock.patch.object(Call, "run", noted):
        yield


def gradients(model: nn.Module, run: Callable[..., Any], loss: Loss, seed: int = 0
              ) -> dict[str, torch.Tensor | None]:
    """Gradients of the model's parameters after one step of `run` from a known random state."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss(run).backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(model: nn.Module, run: Callable[..., Any], loss: Loss, *,
                          close: bool = False, seed: int = 0) -> None:
    """The original's and the wrapped module's gradients are equal, None where the other is None.

    `close`: up to rounding, where autograd adds in another order.
    """
    expected = gradients(model, model, loss, seed)
    after = torch.get_rng_state()
    actual = gradients(model, run, loss, seed)
    assert torch.equal(after, torch.get_rng_state()), "the random state differs after the step"
    assert_equal(expected, actual, close=close)


def assert_equal(expected: dict[str, torch.Tensor | None], actual: dict[str, torch.Tensor | None],
                 *, close: bool = False) -> None:
    """Dictionaries of gradients agree."""
    assert list(expected) == list(actual)
    for name, gradient in expected.items():
        other = actual[name]
        assert (gradient is None) == (other is None), name
        if gradient is None or other is None:
            continue
        if close:
            torch.testing.assert_close(other, gradient, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(gradient, other), name
    assert any(g is not None for g in expected.values())


class Tower(nn.Module):
    """Linear layers with a nonlinearity and dropout between them."""

    def __init__(self, width: int = 16, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return x


class Heads(nn.Module):
    """A body and two heads, returned by name."""

    def __init__(self, dropout: float = 0.0, loss: bool = False) -> None:
        super().__init__()
        self.body = Tower(8, 2, dropout)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.with_loss = loss

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x)
        found = {"left": self.left(h), "right": self.right(h)}
        return {"loss": found["left"].pow(2).mean(), **found} if self.with_loss else found
