"""Gradients of parameters do not count against the budget, whether they stand before the step or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rkmate.dtr
from rkmate.measure.step import measure_peak


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


X = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))


def eager_peak() -> int:
    """Of a step that finds gradients; these are as large as the activations."""
    model = WithLoss()
    model(X).backward()
    return measure_peak(lambda: model(X).backward()).peak


def in_a_block(model: nn.Module, budget: int | None) -> rkmate.dtr.Report:
    with rkmate.dtr(budget=budget) as session:
        model(X).backward()
    return session.report


def wrapped(model: nn.Module, budget: int | None) -> rkmate.dtr.Report:
    module = rkmate.dtr.wrap(model, budget)
    module(X).backward()
    return module.reports[-1]


@pytest.mark.parametrize("run", [in_a_block, wrapped])
def test_the_first_step_counts_what_later_ones_count(
    run: Callable[[nn.Module, int | None], rkmate.dtr.Report],
) -> None:
    model = WithLoss()
    first, *later = [run(model, None).peak_bytes for _ in range(3)]
    assert abs(first - eager_peak()) <= 64
    assert later == [first, first]


@pytest.mark.parametrize("run", [in_a_block, wrapped])
def test_a_step_that_finds_gradients_stays_inside_the_budget(
    run: Callable[[nn.Module, int | None], rkmate.dtr.Report],
) -> None:
    eager, model = WithLoss(), WithLoss()
    budget = int(eager_peak() * 0.8)
    for _ in range(2):
        eager(X).backward()
    run(model, budget)
    assert measure_peak(lambda: run(model, budget)).peak <= budget
    for left, right in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_a_gradient_that_stands_is_not_touched_by_a_call_for_others() -> None:
    model = WithLoss()
    module = rkmate.dtr.wrap(model, "1MiB")
    module(X).backward()
    weight, other = model.layers[0].weight, model.layers[2].weight
    expected = weight.grad.clone()
    (found,) = torch.autograd.grad(module(X), [weight])
    assert torch.equal(found, expected)
    module(X).backward(inputs=[other])
    assert torch.equal(weight.grad, expected)
    assert torch.equal(other.grad, 2 * torch.autograd.grad(model(X), [other])[0])


def test_hooks_see_what_is_added_to_a_gradient_that_stands() -> None:
    model, seen = WithLoss(), []
    module = rkmate.dtr.wrap(model, "1MiB")
    module(X).backward()
    weight = model.layers[0].weight
    expected = weight.grad.clone()
    weight.register_hook(lambda g: seen.append(g.clone()))
    module(X).backward()
    assert torch.equal(seen[0], expected)
    assert torch.equal(weight.grad, expected + expected)


def test_the_hooks_that_wait_for_gradients_go_with_the_block() -> None:
    model = WithLoss()
    in_a_block(model, None)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
