"""Losses, folds and transposed convolutions whose results would stand in a storage larger than their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from tests.equality import assert_same_step, measured_peak
from tests.models import Sample
from tests.semantics.steps import planned

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse_loss": F.mse_loss, "smooth_l1_loss": F.smooth_l1_loss, "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy": lambda y, x: F.binary_cross_entropy(y.sigmoid(), x.abs().clamp(max=1))}


class Inside(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor], reduction: str) -> None:
        super().__init__()
        self.layer, self.loss, self.reduction = nn.Linear(64, 64), loss, reduction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.loss is LOSSES["binary_cross_entropy"]:
            return self.loss(self.layer(x), x)
        return self.loss(self.layer(x), x, reduction=self.reduction)


@pytest.mark.parametrize(("name", "reduction"), [
    *((name, "mean") for name in LOSSES), ("mse_loss", "sum"), ("mse_loss", "none")])
def test_a_loss_in_a_storage_of_its_own(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    model, x = Inside(LOSSES[name], reduction), torch.randn(128, 64)
    module = planned(model, x)
    loss = module(x)
    assert loss.untyped_storage().nbytes() == loss.numel() * 4
    assert (f"rkmate.{name}" in module.source) == (reduction != "none")


def test_the_step_is_inside_its_budget_and_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), Inside(F.mse_loss, "mean"))
    x = torch.randn(64, 32)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    sample = Sample(model, (x,), {}, lambda loss: loss)
    assert measured_peak(module, sample) <= module.plan.budget_bytes
    module.zero_grad()
    assert_same_step(model, module, sample)


class Folds(nn.Module):
    """Images that are taken apart into columns, and folded again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for _ in range(2):
            x = F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1).tanh()
        return x.square().mean()


def _transposed() -> nn.Module:
    """The head of a network over volumes: it makes fewer channels than it reads."""
    return nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.Tanh(), nn.ConvTranspose3d(8, 1, 1), nn.Tanh(),
                         nn.Conv3d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(0))


@pytest.mark.parametrize(("make", "shape"), [(Folds, (4, 3, 12, 12)), (_transposed, (2, 2, 8, 8, 8))])
def test_what_is_made_holds_no_columns(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    sample = Sample(model, (x,), {}, lambda out: out.sum())
    assert measured_peak(module, sample) <= module.plan.budget_bytes
    module.zero_grad()
    assert_same_step(model, module, sample)
