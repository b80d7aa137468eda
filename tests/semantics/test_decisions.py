"""A choice made in the forward stands in the backward, though the scores come out otherwise there."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.planners.registry import PLANNERS
from tests.capturing import captured_once
from tests.semantics.steps import planned, three_budgets, tightest

FAVOURED = [0]
"""The column that `unsteady` makes a little greater."""


@torch.library.custom_op("rkmate_tests::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """As an accelerator computes: never twice the same."""
    result = x.clone()
    result[:, FAVOURED[0]] += 1e-6
    return result


@unsteady.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _gradient(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


unsteady.register_autograd(_gradient)


class Routed(nn.Module):
    """Each row goes through one of two experts, between which it is undecided."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8, 2))
        self.experts = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = unsteady(torch.sin(x) @ self.gate).softmax(1)
        weight, chosen = scores.topk(1, 1)
        routed = torch.einsum("td,tde->te", torch.cos(x), self.experts[chosen[:, 0]])
        return x + torch.sin(routed) * weight


@functools.cache
def layers() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Routed() for _ in range(4))), torch.randn(16, 8)


def test_gradients_go_to_the_experts_that_were_chosen() -> None:
    model, x = layers()
    for module in three_budgets(model, x):
        module.zero_grad()
        FAVOURED[0] = 0
        loss = module(x).sum()
        FAVOURED[0] = 1
        loss.backward()
        for layer in model:
            assert layer.experts.grad[0].abs().sum() > 0
            assert layer.experts.grad[1].abs().sum() == 0
    assert "unsteady" in _recomputed(module.plan)


def _recomputed(plan: rkmate.Plan) -> set[str]:
    return {plan.graph.computations[c].operation for c in plan.schedule.recomputed()}


_LONG = {"auto", "checkmate", "checkmate-lp"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in _LONG else name
                                  for name in sorted(PLANNERS)])
def test_every_planner_decides_once(name: str) -> None:
    model, x = layers()
    with captured_once("routed"):
        try:
            plan = planned(model, x, budget=0.6, planner=name).plan
        except (rkmate.InfeasibleBudget, rkmate.ArgumentError):
            plan = planned(model, x, planner=name).plan
    assert "topk" not in _recomputed(plan)
    assert [of.operation for c, of in zip(plan.graph.cd.c, plan.graph.computations, strict=True)
            if c.decides] == ["topk"] * 4


def test_a_saved_plan_knows_what_was_decided(tmp_path: Path) -> None:
    plan = tightest(*layers()).plan
    plan.save(tmp_path / "plan.json")
    assert rkmate.Plan.load(tmp_path / "plan.json").graph == plan.graph
