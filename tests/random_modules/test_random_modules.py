"""Random modules at random budgets: equal gradients, and never over the budget."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import rkmate
from rkmate.measure.settings import MeasureSettings
from tests.capturing import captured_once
from tests.clocks import NO_CLOCK, count_times
from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample
from tests.random_modules.programs import OPERATIONS, Program, Recipe, Step, recipes

# A small grid: the options need not be good here, only right.
QUICK = replace(NO_CLOCK, options=replace(NO_CLOCK.options, grid=(3, 3)),
                measure=MeasureSettings(passes=1, repeats=1))


@pytest.fixture(autouse=True)
def same_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is; but where many are tried, plans of measured times are, too."""
    if request.node.get_closest_marker("slow") is None:
        count_times(monkeypatch)


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
    with captured_once():
        try:
            module = rkmate.wrap(model, (x,), budget=share, progress=False, settings=QUICK)
        except rkmate.InfeasibleBudget as error:
            module = rkmate.wrap(model, (x,), budget=error.minimum_bytes, progress=False,
                                 settings=QUICK)
    assert_same_step(twin, module, sample)
    assert measured_peak(module, sample) <= module.plan.budget_bytes


def examples(count: int, number: int, held: Callable[[Recipe, float], None] = check) -> None:
    """The examples of one part: always the same ones, in an order of their own."""
    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))
    @given(recipes, st.floats(0.2, 1))
    def run(recipe: Recipe, share: float) -> None:
        held(recipe, share)

    run()


def _recipe(text: str, seed: int = 0) -> Recipe:
    """Steps that each take the latest values."""
    return Recipe(tuple(Step(name, 0, 0) for name in text.split(", ")), (0,), seed)


FOUND_BEFORE: dict[str, tuple[Recipe, float]] = {
    "a product's gradient, whose formula eager mode chooses by values":
        (_recipe("add, add, add, add, stack"), 1.0),
    "a layout that batch norm's trace got wrong": (_recipe("batch norm, add, add, add, add"), 0.2),
    "batch norm between matrix products":
        (_recipe("matmul, softmax, unbind, unbind, matmul, batch norm"), 0.2),
    "made, dropped and made again before the loss": (Recipe((
        Step("concatenate", 7, 0), Step("unbind", 0, 7), Step("cumulate", 4, 1), Step("linear", 0, 0),
        Step("norm", 4, 0), Step("softmax", 0, 0), Step("fill", 3, 0), Step("outer", 0, 0),
        Step("noise", 0, 0)), (3, 2), 1), 0.64),
    "a product's gradient in the layout of the gradient that comes in": (Recipe((
        Step("split", 0, 0), Step("outer", 8, 0), Step("stack", 0, 1), Step("cumulate", 10, 9),
        Step("softmax", 8, 3), Step("in place on a view", 3, 0), Step("other linear", 0, 9),
        Step("batch norm", 4, 11)), (0,), 0), 1.0),
    "a dropout's gradient in the layout of the gradient that comes in": (Recipe((
        Step("batch norm", 0, 0), Step("fill", 0, 0), Step("add", 0, 0), Step("in place", 0, 11),
        Step("dropout", 10, 10), Step("permute", 8, 0), Step("attention", 0, 2),
        Step("batch norm", 2, 4)), (0,), 1), 1.0),
}
"""Recipes that failed once."""


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("what", FOUND_BEFORE)
def test_found_before(what: str) -> None:
    check(*FOUND_BEFORE[what])


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("part", [0, 2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3, 4))])
def test_thirty(part: int) -> None:
    """Two thirds of their time is torch's own tracing, so their number is what counts."""
    examples(6, part)


def test_the_thirty_have_every_operation() -> None:
    found: Counter[str] = Counter()
    for part in range(5):
        examples(6, part, lambda recipe, _: found.update({step.operation for step in recipe.steps}))
    assert set(found) == set(OPERATIONS)
    assert min(found.values()) >= 3, found


@pytest.mark.filterwarnings("ignore:the loss depends on")
@seed(0)
@settings(max_examples=3, deadline=None, database=None, phases=(Phase.generate,),
          suppress_health_check=list(HealthCheck))
@given(recipes.filter(lambda r: len(r.outputs) > 1))
def test_a_loss_that_leaves_outputs_out(recipe: Recipe) -> None:
    """The first backward runs the forward again; then a plan is made for such a loss."""
    model = Program(recipe)
    x = torch.randn(4, 6, 8)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False, settings=QUICK)
    assert_same_step(model, module, Sample(model, (x,), {}, lambda output: _loss(output[:1])))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_two_thousand(part: int) -> None:
    examples(50, 100 + part)
