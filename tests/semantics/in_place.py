"""What the tests of gradients in place share: a small model, a plan of it, and how gradients are compared."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import rkmate

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))


@functools.cache
def plan() -> rkmate.Plan:
    with pytest.raises(rkmate.InfeasibleBudget) as caught:
        make_plan(1)
    return make_plan(caught.value.minimum_bytes)


def make_plan(budget: int) -> rkmate.Plan:
    return rkmate.plan(tower(), (X,), budget=budget,
                       settings=rkmate.Settings(costs="analytic", gradients="in_place"), progress=False)


def wrapped() -> tuple[nn.Sequential, rkmate.PlannedModule]:
    model = tower()
    return model, rkmate.wrap(model, (X,), plan=plan(), settings=rkmate.Settings(gradients="in_place"),
                              progress=False)


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_grads(expected: nn.Module, actual: nn.Module, *, exact: bool = True) -> None:
    """The gradients of two modules are equal; or, where they are not bit for bit, to rounding."""
    for (name, p), q in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            if exact:
                assert torch.equal(p.grad, q.grad), name
            else:
                torch.testing.assert_close(q.grad, p.grad, msg=name)
