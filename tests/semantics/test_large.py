"""Large generated models plan with work that grows with their size, not faster."""

from __future__ import annotations

import cProfile
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.show.plan import Plan

# A small grid: how good the options are does not matter here, and a time limit would hide growth.
QUICK = Settings(options=OptionSettings(grid=(3, 3)))


class Layer(nn.Module):
    """About twenty operations: two projections, a gate, a norm and a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(inner, width)
        self.first, self.gate = nn.Linear(width, inner), nn.Linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        a, b = self.first(h), self.gate(h).sigmoid()
        h = F.gelu(a) * b + a.tanh() * (1 - b)
        h = h * h.mean(-1, keepdim=True).exp() - h.softmax(-1)
        return x + self.last(h.relu() + h.sin())


def _plan(depth: int) -> tuple[Plan, int]:
    """The plan at 0.6 of the model's peak, and how many Python calls it took."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16, 16) for _ in range(depth)))
    profile = cProfile.Profile()
    plan = profile.runcall(rkmate.plan, model, (torch.randn(8, 16),), budget=0.6, progress=False,
                           settings=replace(QUICK, costs="analytic"))
    return plan, sum(entry.callcount for entry in profile.getstats())


@pytest.mark.slow
def test_work_grows_with_the_depth() -> None:
    """Counted, not timed: twice the layers may take little more than twice the calls."""
    (shallow, few), (deep, many) = _plan(5), _plan(10)
    assert deep.nodes["computations"] > 1.9 * shallow.nodes["computations"]
    assert deep.nodes["unique"] == shallow.nodes["unique"]
    assert many < 3 * few


@pytest.mark.slow
def test_two_thousand_operations() -> None:
    (_, few), (plan, many) = _plan(10), _plan(100)
    assert many < 15 * few
    assert plan.nodes["forward"] >= 2000
    assert plan.nodes["unique"] <= 6
    assert plan.peak_bytes <= plan.budget_bytes
