"""The plan that `wrap` takes unless told otherwise: never slower with more memory, nor than others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

import rkmate
from rkmate.budget import Budget
from rkmate.ilp import OptionSettings
from rkmate.pipeline import search
from rkmate.pipeline.prepare import prepare
from rkmate.pipeline.search import NEAR, Searcher
from rkmate.pipeline.settings import Settings
from rkmate.planners.protocol import Outcome, Problem, infeasible
from rkmate.planners.registry import PLANNERS
from rkmate.support.progress import Progress
from tests.compare.models import residual
from tests.models import BANK
from tests.random_modules.programs import Program, Recipe, recipes

OTHERS = ("keep-set", "dtr", "lower-sets", "rotor")
AMPLE = 60.0
"""Seconds for programs that end by themselves: no result here depends on the machine."""
QUICK = Settings(costs="analytic", options=OptionSettings(grid=(3, 3), time_limit=0.2, block_limit=1.0))


def searcher_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
                how: Settings = QUICK) -> Searcher:
    return Searcher(prepare(model, args, kwargs or {}, how, Progress(False)))


def check(searcher: Searcher, levels: int) -> None:
    """Budgets from the largest to the smallest: monotone, and nobody beside is faster."""
    low, high = searcher.smallest.peak, searcher.baseline.peak
    budgets = [low + (high - low) * k // levels for k in range(levels, -1, -1)]
    with mock.patch.object(search, "KEEP_SECONDS", AMPLE):
        plans = searcher.curve([Budget(bytes=b) for b in budgets])
    times = [p.step_seconds for p in plans]
    assert times == sorted(times)
    for budget, own in zip(budgets, plans, strict=True):
        assert own.peak_bytes <= budget
        for name in OTHERS:
            other = searcher.attempt(budget, name, AMPLE).plan
            if other is not None:
                assert own.step_seconds <= other.step_seconds * (1 + NEAR), (name, budget)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.too_slow])
@given(recipes)
def test_random_models(recipe: Recipe) -> None:
    check(searcher_of(Program(recipe), (torch.randn(4, 6, 8),)), 4)


def test_a_residual_model() -> None:
    sample = residual()
    check(searcher_of(sample.model, sample.args), 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet", "transformer_encoder"])
def test_models_of_the_bank(name: str) -> None:
    sample = BANK[name]()
    check(searcher_of(sample.model, sample.args, sample.kwargs, Settings(costs="analytic")), 4)


class Asked:
    """A planner that finds nothing and remembers how long it might have looked."""

    name = "auto"

    def __init__(self) -> None:
        self.limits: list[float | None] = []

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        self.limits.append(time_limit)
        return infeasible("nothing")


def test_auto_shares_its_time_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = residual()
    searcher = searcher_of(sample.model, sample.args)
    asked, kept = Asked(), Asked()
    monkeypatch.setitem(PLANNERS, "auto", asked)
    monkeypatch.setattr(search, "_KEEP", kept)
    monkeypatch.setattr(search, "KEEP_SECONDS", 0.6)        # more than it is given
    limit = (searcher.smallest.peak + searcher.baseline.peak) // 2
    found = searcher.attempt(limit, "auto", 0.25)
    assert found.plan is not None and found.note.startswith("rockmate with its finishing pass; of")
    assert kept.limits == [0.25]
    assert asked.limits[0] is not None and 0 <= asked.limits[0] < 0.25


def test_the_first_budget_is_looked_at_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = residual()
    searcher = searcher_of(sample.model, sample.args)
    kept = Asked()
    monkeypatch.setattr(search, "_KEEP", kept)
    monkeypatch.setattr(search, "KEEP_SECONDS", 0.0)        # never done by then
    low, high = searcher.smallest.peak, searcher.baseline.peak
    searcher.plan(Budget(bytes=high))
    searcher.plan(Budget(bytes=(low + high) // 2))
    searcher.plan(Budget(bytes=low))
    assert kept.limits == [0.0, search.PATIENCE, 0.0]


def test_further_budgets_of_deep_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain comes first, and the keep program gets the time that it has left."""
    sample = residual()
    searcher = searcher_of(sample.model, sample.args)
    low, high = searcher.smallest.peak, searcher.baseline.peak
    searcher.plan(Budget(bytes=(low + high) // 2))
    monkeypatch.setattr(search, "DEEP_NODES", 0)
    before = [searcher.plan(Budget(bytes=low + (high - low) * k // 6)) for k in (1, 3, 5)]
    kept = Asked()
    monkeypatch.setattr(search, "_KEEP", kept)
    monkeypatch.setattr(search, "FURTHER_SECONDS", 0.0)
    fresh = searcher_of(sample.model, sample.args)
    fresh.plan(Budget(bytes=(low + high) // 2))
    for plan in before:
        assert plan.peak_bytes <= plan.budget_bytes
        kept.limits.clear()
        alone = fresh.plan(Budget(bytes=plan.budget_bytes))
        assert kept.limits == [0.1]
        assert alone.peak_bytes <= plan.budget_bytes and alone.step_seconds < fresh.smallest.seconds
        best = min(c.seconds for c in fresh._of_chain(plan.budget_bytes, quick=True))
        assert alone.step_seconds <= best
    assert [p.step_seconds for p in before] == sorted((p.step_seconds for p in before), reverse=True)


def test_below_what_the_chain_reaches() -> None:
    sample = residual()
    searcher = searcher_of(sample.model, sample.args)
    high = searcher.baseline.peak
    middle = (searcher.smallest.peak + high) // 2
    searcher.__dict__["smallest"] = replace(searcher.baseline, peak=high - 1)
    with mock.patch.object(search, "PATIENCE", AMPLE):
        plan = searcher.plan(Budget(bytes=middle))
    assert plan.peak_bytes <= middle and plan.minimum_bytes == plan.peak_bytes
    assert "keep-set" in plan.note


def test_auto_without_time_is_the_default() -> None:
    sample = residual()
    searcher = searcher_of(sample.model, sample.args)
    limit = (searcher.smallest.peak + searcher.baseline.peak) // 2
    found = searcher.attempt(limit, "auto", 1e-9)
    assert found.plan is not None and "none was asked; no time for save-all" in found.note


@pytest.mark.parametrize("name", ["rockmate", "auto"])
def test_a_budget_that_is_too_small(name: str) -> None:
    sample = residual()
    searcher = searcher_of(sample.model, sample.args)
    with pytest.raises(rkmate.InfeasibleBudget, match="smallest budget that rockmate always meets") as error:
        searcher.plan(Budget(bytes=1), name, 1.0)
    assert error.value.minimum_bytes == searcher.smallest.peak
    assert searcher.plan(Budget(bytes=error.value.minimum_bytes), name, 1.0).planner == name
