"""Temporary memory that depends on values is planned for at its most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_peak, measure_step


class Product(nn.Module):
    """The gradient of a product needs more memory where a factor is zero."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.multiply = multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x * self.scale)


@pytest.mark.parametrize("shape", [(64, 32, 64), (2048, 64), (8192 * 8,)], ids=["3", "2", "1"])
@pytest.mark.parametrize("multiply", [lambda x: x.prod(-1), lambda x: x.prod(),
                                      lambda x: x.cumprod(-1)], ids=["dim", "all", "cumulative"])
def test_zeros_stay_within_the_budget(multiply: Callable[[torch.Tensor], torch.Tensor],
                                      shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) + 0.5
    module = rkmate.wrap(Product(multiply), (x,), budget="100%", progress=False)
    one, last = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    one[(0,) * one.dim()] = True
    last[..., -1] = True
    for zeros in (~one & one, torch.rand(shape) < 0.1, one | ~one, one, last):
        values = x.masked_fill(zeros, 0.0)

        def step(values: torch.Tensor = values) -> None:
            module(values).sum().backward()

        step()
        assert measure_peak(step).peak <= module.plan.budget_bytes


class Turned(nn.Module):
    """The exponential of a matrix needs more memory where its norm is large."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (x @ torch.linalg.matrix_exp(self.angles) * self.scale).sum()
        return found


def test_matrices_of_any_norm_stay_within_the_budget() -> None:
    x, found = torch.randn(2, 64), []
    module = rkmate.wrap(Turned(), (x,), budget=1.0, progress=False)
    for norm in (0.0, 1e-3, 0.1, 10.0):
        module.angles.fill_(norm / 64)
        found.append(measure_step(module, lambda: module(x).backward(), timeline=False).peak)
    assert found == sorted(found) and 0.95 * module.plan.peak_bytes < found[-1] <= module.plan.peak_bytes


def test_a_measured_step_is_printed_without_its_timeline() -> None:
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    found = measure_step(net, lambda: net(x).sum().backward())
    assert len(found.timeline) > 2 and "timeline" not in repr(found) and f"peak={found.peak}" in repr(found)
