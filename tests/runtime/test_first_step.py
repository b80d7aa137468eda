"""The first step is measured where the device keeps statistics: here, ones that we make up."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import rkmate
from rkmate.runtime.module import FirstStep
from tests.device.fake import FakeDevice, Ledger


def ledger(mark: int = 1000) -> Ledger:
    """An allocator that holds 1,000 bytes, and once held `mark`."""
    told = Ledger()
    told.add(mark)
    told.add(1000 - mark)
    return told


def take(told: Ledger, size: int) -> None:
    """Allocate for a moment."""
    told.add(size)
    told.add(-size)


def test_over_the_budget_is_said_with_both_figures() -> None:
    told = ledger()
    step = FirstStep(told, 480, 500, [])
    take(told, 501)
    with pytest.warns(rkmate.RkmateWarning, match=r"took 501 bytes.*predicted were 480.*is 500"):
        step.finish()


def test_new_gradients_are_not_the_budgets() -> None:
    weight = nn.Parameter(torch.zeros(10))
    told = ledger()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = FirstStep(told, 480, 500, [weight])
        take(told, 540)
        step.finish()
    weight.grad = torch.zeros(10)
    told = ledger()
    step = FirstStep(told, 480, 500, [weight])
    take(told, 540)
    with pytest.warns(rkmate.RkmateWarning):
        step.finish()


def test_the_users_own_peak_stays() -> None:
    """An allocator has one peak: whoever resets it takes it from the user."""
    told = ledger(mark=9000)
    step = FirstStep(told, 480, 500, [])
    take(told, 400)
    step.finish()
    assert told.peak() == 9000 and told.resets == 0


def test_a_step_above_the_users_own_peak_is_seen() -> None:
    told = ledger(mark=9000)
    step = FirstStep(told, 480, 500, [])
    take(told, 8001)
    with pytest.warns(rkmate.RkmateWarning, match="took 8,001 bytes"):
        step.finish()
    assert told.resets == 0


def test_under_the_users_own_peak_what_is_left_is_seen() -> None:
    told = ledger(mark=9000)
    step = FirstStep(told, 480, 500, [])
    told.add(600)
    with pytest.warns(rkmate.RkmateWarning, match="took 600 bytes"):
        step.finish()


def test_the_user_resets_in_the_middle() -> None:
    told = ledger(mark=9000)
    step = FirstStep(told, 480, 500, [])
    told.reset_peak()
    take(told, 600)
    with pytest.warns(rkmate.RkmateWarning, match="took 600 bytes"):
        step.finish()


def test_a_wrapped_module_measures_its_first_step_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    with FakeDevice() as device:
        def step(module: nn.Module) -> None:
            out = module(x)
            take(device.statistics, 1 << 40)
            out.sum().backward()

        wrapped = rkmate.wrap(model, (x,), budget=1.0, progress=False)
        planning = device.statistics.resets
        with pytest.warns(rkmate.RkmateWarning, match="the first training step took"):
            step(wrapped)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(wrapped)
        assert device.statistics.resets == planning
        assert device.statistics.peak() == 1 << 40
        silent = rkmate.wrap(model, (x,), budget=1.0, progress=False,
                             settings=rkmate.Settings(run=rkmate.RunSettings(verify=False)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(silent)


def test_what_libraries_keep_is_no_part_of_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    with FakeDevice() as device, warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = rkmate.wrap(model, (x,), budget=1.0, progress=False)
        device.library_bytes = 1 << 40       # not taken yet, by this thread
        out = wrapped(x)
        device.warm_up()
        out.sum().backward()
