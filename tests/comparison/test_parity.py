"""`rkmate.check`: what it reports of equal runs and of different ones, and a model left as it was."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rkmate
from rkmate.comparison import parity
from rkmate.comparison.parity import Difference, Parity, _difference, check
from tests.show.models import tower

ANALYTIC = rkmate.Settings(costs="analytic")
X = torch.randn(64, 8)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 8))))


def checked(module: nn.Module, *args: Any, budget: Any = 0.7, steps: int = 3, settings: Any = ANALYTIC,
            **more: Any) -> Parity:
    return check(module, args or (X,), budget=budget, steps=steps, settings=settings, progress=False, **more)


def test_a_planned_run_has_the_bits_of_the_plain_one() -> None:
    found = checked(model())
    assert found.same_bits and found.within_budget and found.same_losses and found.same_draws
    assert found.gradients == found.state == found.repeated == Difference()
    assert len(found.plain.losses) == 3 and found.plain.losses == found.planned.losses
    assert len(set(found.plain.losses)) == 3                    # it trains, and draws anew
    assert found.planned.peak_bytes <= found.plan.budget_bytes < found.plain.peak_bytes
    assert min(found.plain.step_seconds, found.planned.step_seconds) > 0
    lines = str(found).splitlines()
    assert lines[0].startswith("Sequential, 3 steps with AdamW: the same bits, within the budget of ")
    assert "gradients    the same bits" in lines and len(lines) == 10


def test_a_model_with_a_loss_of_its_own() -> None:
    module, args = tower(2)
    assert checked(module, *args, steps=1).same_bits


def test_a_loss_and_an_optimizer() -> None:
    made = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.5))
        return made[-1]
    found = checked(model(), loss=nn.functional.mse_loss, loss_args=(torch.zeros(64, 8),), steps=8,
                    optimizer=optimizer)
    assert found.same_bits and found.optimizer == "SGD" and len(made) == 2
    assert found.planned.losses[-1] < found.planned.losses[0] / 2


def test_losses_that_are_no_numbers_are_the_same() -> None:
    found = checked(model(), loss=lambda y: y.sum().log() * float("nan"), steps=2)
    assert found.same_losses and found.same_bits


def test_several_calls_before_the_backward() -> None:
    assert checked(model(), calls=2).same_bits


class Scaled(nn.Module):
    """Writes to its input, which takes a gradient of its own elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask.mul_(2)
        return self.inner(x) * mask


def test_inputs_are_fresh_in_every_step_and_their_gradients_count() -> None:
    x, mask = (X * 2).requires_grad_(True) * 1, torch.ones(64, 8)        # x is no leaf
    found = checked(Scaled(), x, mask, budget=1.0)
    assert found.same_bits and torch.equal(mask, torch.ones(64, 8)) and x.grad_fn is not None


@pytest.mark.parametrize("training", [True, False])
def test_model_generators_and_flags_stay_as_they_are(training: bool) -> None:
    module = model().train(training)
    module[0].weight.grad = torch.full_like(module[0].weight, 3.0)
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    found = checked(module)
    assert found.same_bits and len(set(found.plain.losses)) == 3         # with dropout: trained in train mode
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[index]
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(m.training is training for m in module.modules())
    assert torch.equal(module[0].weight.grad, torch.full_like(module[0].weight, 3.0))
    assert module[1].weight.grad is None


# -- runs that differ ---------------------------------------------------------------------

@pytest.fixture
def planned_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[nn.Module], None]], None]:
    """Changes what `wrap` returns."""
    wrap = parity.wrap

    def set_change(change: Callable[[Any], None]) -> None:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made = wrap(*args, **kwargs)
            change(made)
            return made
        monkeypatch.setattr(parity, "wrap", wrapped)
    return set_change


def test_a_wrong_gradient_is_found_and_named(planned_as: Any) -> None:
    def change(module: Any) -> None:
        module.get_parameter("5.weight").register_hook(lambda g: g + 1e-3)
    planned_as(change)
    found = checked(model())
    assert not found.same_bits and found.gradients.name == "5.weight" and found.within_budget
    assert found.gradients.value == pytest.approx(1e-3, rel=0.3) and found.gradients.largest > 0
    assert not found.repeated.value and found.same_draws and found.state.value and not found.same_losses
    text = str(found)
    assert "not the same bits" in text and "in 5.weight" in text and "own repetition: the same bits" in text


def test_other_draws_are_found(planned_as: Any) -> None:
    def change(module: Any) -> None:
        module.get_parameter("0.weight").register_hook(lambda g: g + 0 * torch.rand(()))
    planned_as(change)
    found = checked(model())
    assert not found.same_draws and not found.same_bits and found.same_losses
    assert "other draws" in str(found)


def test_a_run_over_its_budget_says_so(planned_as: Any) -> None:
    def change(module: Any) -> None:
        module.get_parameter("5.weight").register_hook(lambda g: torch.zeros(1 << 20).sum() + g)
    planned_as(change)
    found = checked(model())
    assert not found.within_budget and "OVER the budget" in str(found)


def test_an_original_that_does_not_repeat_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    class Drifts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + next(numbers))
    plan = rkmate.plan(nn.Linear(8, 8), (X,), budget=1.0, settings=ANALYTIC, progress=False)

    def unplanned(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.plan = plan
        return module
    monkeypatch.setattr(parity, "wrap", unplanned)
    found = checked(Drifts(8, 8))
    assert found.repeated.value and not found.same_bits
    assert "own repetition: differ by up to" in str(found)


# -- differences --------------------------------------------------------------------------

def test_differences() -> None:
    nan = float("nan")
    a: dict[str, torch.Tensor | None] = {"a": torch.tensor([1.0, nan]), "b": torch.tensor([4, 5]), "c": None,
                                         "d": None, "e": torch.zeros(0)}
    assert _difference(a, {**a}, 1) == Difference()
    assert _difference(a, {**a, "b": torch.tensor([4, 2])}, 2) == Difference(3.0, "b", 5.0, 2)
    assert _difference(a, {**a, "a": torch.tensor([1.5, nan])}, 2).value == 0.5
    assert _difference(a, {**a, "a": torch.tensor([1.0, 2.0])}, 1).value == float("inf")
    assert _difference(a, {**a, "c": torch.zeros(2)}, 1) == Difference()            # no gradient: zeros
    assert _difference(a, {**a, "d": torch.tensor([0.0, -2.0])}, 1) == Difference(2.0, "d", 0.0, 1)
    infinite = {"a": torch.tensor([float("inf")])}
    assert _difference(infinite, {"a": infinite["a"].clone()}, 1) == Difference()


# -- errors -------------------------------------------------------------------------------

@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_wrong_numbers_of_steps(steps: Any) -> None:
    with pytest.raises(rkmate.ArgumentError, match="steps is"):
        checked(model(), steps=steps)


def test_a_model_that_cannot_be_copied() -> None:
    module = model()
    module.register_buffer("made", module[0].weight * 2)
    with pytest.raises(rkmate.ArgumentError, match=r"Sequential cannot be copied \(copy.deepcopy\)"):
        checked(module)


def test_what_wrap_raises() -> None:
    with pytest.raises(rkmate.InfeasibleBudget):
        checked(model(), budget=1000)
