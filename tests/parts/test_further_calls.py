"""Steps by parts that call the model again after a backward, before their optimizer steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.measure.step import measure_step

X = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
Step = Callable[[nn.Module], None]


class Looking(nn.Module):
    """Layers, and a branch on a value."""

    def __init__(self, out: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))
                                    for _ in range(4))
        self.head = nn.Linear(32, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        out: torch.Tensor = self.head(x)
        return out


def attacked(model: nn.Module) -> None:
    """A call that is finished by `torch.autograd.grad`, and two that are open together."""
    x = X.clone().requires_grad_()
    slope, = torch.autograd.grad(model(x).sum(), x)
    (model((x + slope).detach()) * model(X)).mean().backward()


def turned(model: nn.Module) -> None:
    """A call that is finished by `torch.autograd.grad` while another one is open, and one more."""
    first, way = model(X), X.cos().requires_grad_()
    target = first.detach().softmax(-1)
    near = F.kl_div(model(X + 0.1 * way).log_softmax(-1), target, reduction="batchmean")
    way = F.normalize(torch.autograd.grad(near, way)[0], dim=1)
    found = F.kl_div(model(X + way).log_softmax(-1), target, reduction="batchmean")
    (first.square().mean() + found).backward()


def kept(model: nn.Module) -> None:
    """Two calls, one after the other, whose losses are kept: a number for each element."""
    losses = []
    for x in (X, X + 1):
        out = model(x)
        losses.append(F.mse_loss(out, torch.zeros_like(out), reduction="none"))
        losses[-1].mean().backward()


def trained(model: nn.Module, step: Step, steps: int = 9) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    optimizer.zero_grad()


def peak(model: nn.Module, step: Step) -> int:
    return measure_step(model, lambda: step(model)).peak


@pytest.mark.parametrize(("step", "share"), [(attacked, 0.7), (kept, 0.85)])
def test_a_step_keeps_to_the_budget_with_all_of_its_calls(step: Step, share: float) -> None:
    torch.manual_seed(0)
    model = Looking(32 if step is attacked else 256)
    plain, budget = copy.deepcopy(model), int(share * peak(copy.deepcopy(model), step))
    rkmate.apply(model, budget=budget, settings=rkmate.Settings(costs="analytic"), progress=False)
    trained(plain, step)
    trained(model, step)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert peak(model, step) <= budget


def test_the_loss_of_two_calls_counts() -> None:
    """They are most of it: a budget below them is refused."""
    def compared(model: nn.Module) -> None:
        first, second = model(X), model(X + 1)
        (F.mse_loss(first, second) + first.square().mean()).backward()

    model = Looking(2000)
    whole = peak(copy.deepcopy(model), compared)
    rkmate.apply(model, budget=int(0.8 * whole), settings=rkmate.Settings(costs="analytic"), progress=False)
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        trained(model, compared, 4)
    assert 0.9 * whole <= error.value.minimum_bytes <= 1.02 * whole


def test_a_step_that_was_measured_in_part_is_measured_again() -> None:
    """A budget that is near the step as it is: it is met, or refused."""
    model = Looking(256)
    budget = int(0.85 * peak(copy.deepcopy(model), turned))
    rkmate.apply(model, budget=budget, settings=rkmate.Settings(costs="analytic"), progress=False)
    with contextlib.suppress(rkmate.InfeasibleBudget):
        trained(model, turned)
        assert peak(model, turned) <= budget
