"""Random modules at random budgets: equal gradients, and never over the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rkmate
from rkmate.ilp import OptionSettings
from rkmate.measure.costs import MeasureSettings
from rkmate.pipeline import Settings
from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample
from tests.random_modules.programs import Program, Recipe, recipes

# A small grid: the options need not be good here, only right.
QUICK = Settings(options=OptionSettings(grid=(3, 3), time_limit=0.2, block_limit=1.0),
                 measure=MeasureSettings(repeats=1))


def _loss(output: Any) -> torch.Tensor:
    """Weights differ per element, in the output's layout, so that the gradients have it too: a plan
    takes them so, and a sum in another order is rounded otherwise. It allocates no more than a plan
    leaves room for: a loss outside the module is the caller's, and of its bytes three times the
    outputs are planned for."""
    return sum((t * _weights(t)).sum() for t in output)  # type: ignore[return-value]


def _weights(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t).copy_(torch.linspace(-1, 1, t.numel()).view(t.shape))


def check(recipe: Recipe, share: float) -> None:
    """Wrap at a share of the model's own peak, or the smallest feasible budget above, and train."""
    model = Program(recipe)
    x = torch.randn(4, 6, 8)
    sample = Sample(model, (x,), {}, _loss)
    twin = copy.deepcopy(model)
    try:
        module = rkmate.wrap(model, (x,), budget=share, progress=False, settings=QUICK)
    except rkmate.InfeasibleBudget as error:
        module = rkmate.wrap(model, (x,), budget=error.minimum_bytes, progress=False,
                             settings=QUICK)
    assert_same_step(twin, module, sample)
    assert measured_peak(module, sample) <= module.plan.budget_bytes


FOUND_BEFORE: list[tuple[Recipe, float]] = []
"""Recipes that failed once."""


@pytest.mark.parametrize(("recipe", "share"), FOUND_BEFORE)
def test_found_before(recipe: Recipe, share: float) -> None:
    check(recipe, share)


_COMMON = {"deadline": None, "derandomize": True, "database": None,
           "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=20, **_COMMON)
@given(recipes, st.floats(0.2, 1))
def test_twenty(recipe: Recipe, share: float) -> None:
    check(recipe, share)


@pytest.mark.slow
@settings(max_examples=200, **_COMMON)
@given(recipes, st.floats(0.2, 1))
def test_two_hundred(recipe: Recipe, share: float) -> None:
    check(recipe, share)


@pytest.mark.slow
@settings(max_examples=2000, **_COMMON)
@given(recipes, st.floats(0.2, 1))
def test_two_thousand(recipe: Recipe, share: float) -> None:
    check(recipe, share)
