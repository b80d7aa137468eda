"""Forwards that differentiate by themselves: the inner gradient is part of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad

import rkmate
from tests.equality import assert_same_step
from tests.models import Sample
from tests.semantics.steps import planned, three_budgets


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32),
                         nn.Softplus(), nn.Linear(32, 1))


class Forces(nn.Module):
    """An energy and its slope, as the loss on forces needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.detach().requires_grad_()
        distances = (places[:, None] - places[None]).square().sum(-1)
        energy = self.net(places).sum() + torch.exp(-distances).sum()
        slope, = grad(energy, places, create_graph=True)
        return energy, -slope


class Penalty(nn.Module):
    """A critic with the penalty of its slope between two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, 2, 1),
                                    nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        share = torch.rand(len(real), 1, 1, 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        slope, = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        far = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * far


def _forces_loss(found: Any) -> torch.Tensor:
    energy, forces = found
    return energy.square() + (forces - 1).square().sum()


@pytest.mark.parametrize(("kind", "args", "options", "loss"), [
    pytest.param(Forces, (torch.randn(8, 3),), {"trains": "all"}, _forces_loss, marks=pytest.mark.slow),
    (Penalty, (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)), {}, lambda loss: loss)])
def test_the_step_is_the_originals(kind: type[nn.Module], args: tuple[torch.Tensor, ...],
                                   options: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, original = kind(), kind()
    for module in three_budgets(model, *args, **options):
        original.load_state_dict(model.state_dict())
        original.zero_grad()
        model.zero_grad()
        assert_same_step(original, module, Sample(module, args, {}, loss))
    assert module.plan.peak_bytes < module.plan.baseline_peak_bytes
    assert module.plan.schedule.recomputed()


class CallsBackward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.sum().backward(retain_graph=True)
        return y


def test_a_backward_in_the_forward_is_refused() -> None:
    with pytest.raises(rkmate.CaptureError, match=r"test_inner_gradients.py:\d+.*calls backward\(\)"):
        planned(CallsBackward(4, 4), torch.randn(2, 4))


def test_an_input_without_gradient_fails_as_in_the_original() -> None:
    class Slope(Forces):
        def forward(self, places: torch.Tensor) -> torch.Tensor:
            slope, = grad(self.net(places).sum(), places, create_graph=True)
            return slope.sum()

    with pytest.raises(rkmate.CaptureError, match="does not require grad"):
        planned(Slope(), torch.randn(8, 3))
