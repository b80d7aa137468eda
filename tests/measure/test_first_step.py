"""The first step is measured where the device keeps statistics: here, one that we make up."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import rkmate
from rkmate.runtime.first_step import FirstStep


class Told:
    """An allocator whose peak is known beforehand."""

    def __init__(self, peak: int) -> None:
        self._peak = peak
        self.resets = 0

    def allocated(self) -> int:
        return 1000

    def peak(self) -> int:
        return 1000 + self._peak

    def reset(self) -> None:
        self.resets += 1


def test_over_the_budget_is_said_with_both_figures() -> None:
    step = FirstStep(Told(501), 480, 500, [])
    with pytest.warns(rkmate.RkmateWarning, match=r"took 501 bytes.*predicted were 480.*is 500"):
        step.finish()


def test_new_gradients_are_not_the_budgets() -> None:
    weight = nn.Parameter(torch.zeros(10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FirstStep(Told(540), 480, 500, [weight]).finish()
    weight.grad = torch.zeros(10)
    with pytest.warns(rkmate.RkmateWarning):
        FirstStep(Told(540), 480, 500, [weight]).finish()


def test_a_wrapped_module_measures_its_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Told] = []

    def statistics(device: torch.device) -> Told:
        told.append(Told(1 << 40))
        return told[-1]

    monkeypatch.setattr("rkmate.runtime.module.statistics_of", statistics)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    wrapped = rkmate.wrap(model, (x,), budget=1.0, progress=False)
    with pytest.warns(rkmate.RkmateWarning, match="the first training step took"):
        wrapped(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(x).sum().backward()
    assert sum(t.resets for t in told) == 1
    silent = rkmate.wrap(model, (x,), budget=1.0, progress=False, verify=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent(x).sum().backward()
