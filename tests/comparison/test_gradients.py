"""Whatever the planner, the gradients are the original model's, bit for bit."""

from __future__ import annotations

import pytest

import rkmate
from rkmate.planners.registry import PLANNERS
from tests.capturing import captured_once
from tests.comparison.models import residual
from tests.equality import assert_same_step, measured_peak

BUDGET = 0.65

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("name", [  # auto asks all of the others, checkmate takes long
    pytest.param(n, marks=pytest.mark.slow) if n in ("auto", "checkmate") else n for n in PLANNERS])
def test_same_step(name: str) -> None:
    sample, original = residual(), residual()

    def wrapped(budget: int | float) -> rkmate.PlannedModule:
        return rkmate.wrap(sample.model, sample.args, budget=budget,
                           settings=rkmate.Settings(
                               planner=name, planning_seconds=60.0 if name == "checkmate-lp" else 5.0),
                           progress=False)

    with captured_once("residual"):
        try:
            rk = wrapped(BUDGET)
        except rkmate.InfeasibleBudget as error:
            rk = wrapped(error.minimum_bytes)     # the least that this planner can do
    assert rk.plan.planner == name
    assert bool(rk.plan.schedule.recomputed()) == (name != "save-all")
    assert_same_step(original.model, rk, original)
    assert measured_peak(rk, sample) <= rk.plan.budget_bytes
