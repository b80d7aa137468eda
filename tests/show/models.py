"""Small models whose plans are shown, and their plans, made once."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


class Wave(nn.Module):
    """A residual layer of six operations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.scale
        for _ in range(5):
            h = h.sin()
        return x + h


class Waves(nn.Module):
    """Layers that are alike: a few are traced."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Wave() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out.sum()


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
    return rkmate.wrap(model, args, budget=budget, settings=rkmate.Settings(costs="analytic"))


@functools.cache
def scores_plan() -> rkmate.Plan:
    return rkmate.plan(Scores(), (torch.randn(64, 64, requires_grad=True),), budget=0.8,
                       settings=rkmate.Settings(costs="analytic"))


in_one_process = pytest.mark.xdist_group("plans shown")
"""On tests that read the plans of this module: in one process, where they are made once."""


@functools.cache
def long_plan() -> rkmate.Plan:
    """More than 2,000 nodes."""
    return rkmate.plan(Waves(110), (torch.randn(16, 8),), budget=1.0,
                       settings=rkmate.Settings(costs="analytic"))


@functools.cache
def curve() -> Curve:
    model, args = tower(4)
    return rkmate.tradeoff(model, args, settings=rkmate.Settings(costs="analytic"))


PLANS: dict[str, Callable[[], rkmate.Plan]] = {
    "half": lambda: wrapped().plan, "loss outside": scores_plan,
    "all kept": lambda: curve()[0], "between": lambda: curve()[3], "further": lambda: curve()[6],
    "smallest": lambda: curve()[-1]}
"""Made when they are read: not when tests are collected."""
BLOCKS = 4
"""Of the plan of `wrapped`."""
