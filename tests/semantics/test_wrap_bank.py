"""The bank under budgets: the same step bit for bit, never over the budget, and as predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from tests.capturing import captured_once
from tests.equality import assert_same_step, assert_same_trace, measured_peak, trace_step
from tests.models import BANK, WITH_DROPOUT, Sample

FRACTIONS = (1.0, 0.7, "smallest")
IMPOSSIBLE = 1
"""A budget in bytes that no model can meet."""
# A small grid: the options need not be the best here, only right.
QUICK = Settings(options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=2.0))
FAITHFUL = 0.02
"""How far a prediction may be from what is measured."""


SLOW = ("transformer", "transformer_decoder", "transformer_encoder", "t5", "bert", "llama", "vit",
        "mlp_mixer", "densenet", "unet", "views", "gpt2")
"""With dropout; others of the same kind are left."""
LONG: dict[float | str, tuple[str, ...]] = {
    1.0: ("llama", "vit", "t5", "regnet", "transformer", "transformer_decoder", "mlp_mixer",
          "densenet", "resnet", "bert", "transformer_encoder", "views", "gpt2", "unet"),
    0.7: ("vit", "views", "regnet", "t5", "unet", "llama", "transformer", "transformer_decoder", "mlp_mixer",
          "densenet", "resnet", "bert", "transformer_encoder", "gpt2"),
    "smallest": ("regnet", "resnet", "transformer", "transformer_decoder", "vit", "llama", "t5",
                 "densenet", "unet", "mlp_mixer", "views", "bert", "transformer_encoder")}
"""By budget; others of the same kinds (gpt2, batch_norm_cnn, ...) are left."""


pytestmark = pytest.mark.usefixtures("deterministic")


def wrapped(sample: Sample, fraction: float | str, kind: str) -> rkmate.PlannedModule:
    """The sample's model under a fraction of its peak, or under the smallest budget there is."""
    budget: float | int
    with captured_once(kind):
        if isinstance(fraction, str):
            with pytest.raises(rkmate.InfeasibleBudget) as caught:
                wrap(sample, IMPOSSIBLE)
            budget = caught.value.minimum_bytes
        else:
            budget = fraction
        return wrap(sample, budget)


def wrap(sample: Sample, budget: float | int) -> rkmate.PlannedModule:
    return rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=budget, progress=False,
                       settings=QUICK)


def together(name: str, *more: float | str) -> Any:
    """A model's tests share a process, and so what it remembers."""
    long = any(name in LONG[fraction] for fraction in more)
    return pytest.param(name, *more, id="-".join(map(str, (name, *more))),
                        marks=[pytest.mark.xdist_group(name), *[pytest.mark.slow] * long])


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize(("name", "fraction"), [together(n, f) for n in BANK for f in FRACTIONS])
def test_same_step_within_budget(name: str, fraction: float | str) -> None:
    make = BANK[name]
    sample = make()
    rk = wrapped(sample, fraction, name)
    plan = rk.plan
    assert plan.peak_bytes <= plan.budget_bytes
    if fraction != 1.0:
        assert plan.budget_bytes < plan.baseline_peak_bytes

    original = make()
    assert_same_step(original.model, rk, original)
    assert_same_parameters(sample.model, rk)

    peak = measured_peak(rk, sample)
    assert peak <= plan.budget_bytes, f"{peak:,} bytes in {plan.budget_bytes:,}"
    # A loss that keeps copies may have led to another plan.
    assert rk.plan.peak_bytes == pytest.approx(peak, rel=FAITHFUL)


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("name", [
    pytest.param(n, marks=pytest.mark.slow) if n in SLOW
    else together(n) for n in WITH_DROPOUT])
def test_same_step_with_dropout(name: str) -> None:
    """Random operations made anew draw the same numbers, and the generator ends where it would."""
    make: Callable[..., Sample] = BANK[name]
    for fraction in FRACTIONS[1:]:
        sample, original = make(dropout=0.1), make(dropout=0.1)
        rk = wrapped(sample, fraction, f"{name} with dropout")
        assert_same_step(original.model, rk, original)
        assert measured_peak(rk, sample) <= rk.plan.budget_bytes


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("name", [together(n) for n in ("batch_norm_cnn", "lstm", "tied")])
def test_a_refused_budget_leaves_a_model_to_be_wrapped_again(name: str) -> None:
    """Captured anew, unlike above."""
    sample, original = BANK[name](dropout=0.1), BANK[name](dropout=0.1)
    with pytest.raises(rkmate.InfeasibleBudget) as caught:
        wrap(sample, IMPOSSIBLE)
    rk = wrap(sample, caught.value.minimum_bytes)
    assert_same_step(original.model, rk, original)
    assert_same_parameters(sample.model, rk)


@pytest.mark.parametrize("name", [together(n) for n in BANK])
def test_bank_is_repeatable(name: str) -> None:
    """What the other tests rest on: the same seed gives the same model, inputs and step."""
    first, second = BANK[name](), BANK[name]()
    assert_same_trace(trace_step(first.model, first, 3), trace_step(second.model, second, 3), name)
    other = BANK[name](seed=1)
    different = trace_step(other.model, other, 3).loss
    assert not torch.equal(different, trace_step(first.model, first, 3).loss)


def assert_same_parameters(model: nn.Module, rk: nn.Module) -> None:
    """The wrapped module has the original's own parameters and buffers, under the same names."""
    ours, theirs = dict(rk.named_parameters()), dict(model.named_parameters())
    assert list(ours) == list(theirs) and all(ours[n] is theirs[n] for n in ours)
    assert list(rk.state_dict()) == list(model.state_dict())
    buffers = dict(rk.named_buffers())
    assert all(buffers[n] is b for n, b in model.named_buffers())
