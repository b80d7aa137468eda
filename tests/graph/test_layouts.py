"""Strides of a trace: those that the kernels return."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.equality import assert_same_step
from tests.models.sample import Sample, weighted_mean


class _ScaledBranch(nn.Module):
    """A branch with a scale per channel, and a layer norm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width, 1, 1))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.scale * x.square()
        normed: torch.Tensor = self.norm(y.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2).flatten(2).mean(-1)


def test_the_gradient_of_a_layer_norm_over_channels_has_the_layout_of_its_kernel() -> None:
    """Its product with the branch, which the gradient of the scale sums over, has that layout too:
    written over the branch, it would be summed in another order."""
    torch.manual_seed(0)
    model, x = _ScaledBranch(8), torch.randn(2, 8, 4, 4, requires_grad=True)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, weighted_mean(2, 8)))


class _Activated(nn.Module):
    """An activation whose gradient comes with the channels last."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(x + self.scale * x.square())
        return y.permute(0, 2, 3, 1).flatten(1)


@pytest.mark.parametrize("activation", [F.elu, F.relu6, F.hardswish, F.hardsigmoid, F.softplus])
def test_the_gradient_of_an_activation_has_the_layout_of_its_kernel(
        activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gradient and value differ in layout: the gradient's is the result's."""
    torch.manual_seed(0)
    model, x = _Activated(activation), torch.randn(2, 8, 4, 4, requires_grad=True)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, weighted_mean(2, 128)))
