"""Small models whose plans are shown, and their plans, made once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import rkmate
from rkmate.show.curve import Curve


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Scores(nn.Module):
    """Returns scores: the loss is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def tower(layers: int) -> tuple[Tower, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Tower(layers), (torch.randint(0, 50, (4, 64)),)


@functools.cache
def wrapped(budget: float = 0.5) -> rkmate.PlannedModule:
    model, args = tower(4)
    return rkmate.wrap(model, args, budget=budget, costs="analytic")


@functools.cache
def scores_plan() -> rkmate.Plan:
    return rkmate.plan(Scores(), (torch.randn(64, 64, requires_grad=True),), budget=0.8,
                       costs="analytic")


the_long_plan = pytest.mark.xdist_group("the long plan")
"""On tests that read `long_plan`: in one process, where it is made once."""


@functools.cache
def long_plan() -> rkmate.Plan:
    """More than 2,000 nodes."""
    model, args = tower(130)
    return rkmate.plan(model, args, budget=1.0, costs="analytic")


@functools.cache
def curve() -> Curve:
    model, args = tower(4)
    return rkmate.tradeoff(model, args, costs="analytic")
