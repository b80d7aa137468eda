"""What is measured in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rkmate
from rkmate.comparison import measured
from rkmate.comparison.measured import Bench, interleaved, loss_of
from rkmate.comparison.table import Row
from rkmate.errors import ArgumentError
from tests.comparison.models import residual, stack


@dataclass
class Here:
    """A process that is none: it works in this one."""

    target: Callable[[str], None]
    args: tuple[str]

    def start(self) -> None:
        self.target(*self.args)

    def join(self) -> None:
        """There is nothing to wait for."""


def processes(monkeypatch: pytest.MonkeyPatch, real: int) -> None:
    """So many processes are started, and what is measured later is measured in this one."""
    start = multiprocessing.get_context("spawn").Process
    kinds = chain([start] * real, repeat(Here))
    context = SimpleNamespace(Process=lambda **how: next(kinds)(**how))
    monkeypatch.setattr(measured, "multiprocessing", SimpleNamespace(get_context=lambda kind: context))


@pytest.mark.slow
def test_two_planners_and_todays_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    processes(monkeypatch, 1)
    sample = stack()
    found = rkmate.compare(sample.model, sample.args, budgets=[0.7], planners=["rockmate", "chen"],
                           measure=True, progress=False, settings=rkmate.Settings(costs="analytic"))
    rows = {r.method: r for r in found}
    assert list(rows) == ["rockmate", "chen", "eager", "checkpoint_sequential 2"]
    for name in ("rockmate", "chen"):
        row = rows[name]
        assert row.status == "ok" and row.measured_ratio is not None and row.measured_ratio > 0
        assert row.measured_peak_bytes is not None and row.budget_bytes is not None
        assert row.measured_peak_bytes <= row.budget_bytes
        assert row.measured_peak_bytes == pytest.approx(row.peak_bytes, rel=0.02)
    eager, segments = rows["eager"], rows["checkpoint_sequential 2"]
    assert eager.measured_ratio == 1.0 and eager.planning_seconds is None
    assert eager.measured_peak_bytes is not None and segments.measured_peak_bytes is not None
    assert segments.measured_peak_bytes < eager.measured_peak_bytes
    assert eager.measured_peak_bytes == pytest.approx(found.baseline_peak_bytes, rel=0.05)
    assert "measured peak" in str(found)


def test_what_cannot_be_measured_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of another model fails where it is run; checkpointing does not apply to a module that
    is no sequence."""
    processes(monkeypatch, 0)
    sample, other = residual(), residual(2)
    plan = rkmate.plan(other.model, other.args, budget=1.0, settings=rkmate.Settings(costs="analytic"),
                       progress=False)
    with Bench(sample.model, sample.args, {}) as bench:
        row = bench.measured(Row("rockmate", plan.budget_bytes, "ok", 0.1, 1, 1.0), plan)
        today = bench.today()
    assert row.status == "failed" and row.note.startswith("PlanError: the plan belongs to another")
    assert [r.status for r in today] == ["ok", "does not apply"]
    assert "Residual is no nn.Sequential" in today[1].note
    text = str(rkmate.Comparison((row, *today), "Residual", "analytic", 10, 1.0, {}))
    assert "does not apply: Residual" in text and "failed: PlanError" in text


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
def test_what_is_measured_is_planned_under_the_settings_of_the_comparison(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is cut in other places is another one: only the same settings find the plan's."""
    processes(monkeypatch, 0)
    sample = residual()
    row, *_ = rkmate.compare(sample.model, sample.args, budgets=[1.0], planners=["save-all"], measure=True,
                             progress=False, settings=rkmate.Settings(
                                 costs="analytic", trains="all", cut=rkmate.CutSettings(least=2, most=4)))
    assert (row.status, row.note) == ("ok", "")
    assert row.measured_peak_bytes == pytest.approx(row.peak_bytes, rel=0.02)


def test_a_model_that_cannot_be_pickled() -> None:
    class Local(nn.Linear):
        """Not importable."""

    with pytest.raises(ArgumentError, match="Local cannot be pickled"):
        rkmate.compare(Local(4, 4), (torch.randn(8, 4),), budgets=[1.0], planners=["save-all"], measure=True,
                       progress=False, settings=rkmate.Settings(costs="analytic"))


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def test_losses() -> None:
    x = torch.arange(4.0, requires_grad=True)
    assert loss_of(Output(x.sum(), x)).item() == 6.0
    assert loss_of((x.sum(), x.max(), x)).item() == 9.0
    assert torch.equal(loss_of({"a": x, "b": torch.ones(3)}), x.tanh().mean())
    with pytest.raises(ArgumentError, match="no output requires a gradient"):
        loss_of(torch.ones(3))


def test_steps_are_taken_in_turns() -> None:
    calls: list[str] = []

    def step(name: str) -> torch.Tensor:
        calls.append(name)
        return torch.zeros(())

    assert interleaved(lambda: step("eager"), lambda: step("planned"), 3) > 0
    assert calls == ["eager", "planned"] * 4


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
def test_steps_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peaks of a comparison, planned and measured, are of as many calls as the settings say."""
    processes(monkeypatch, 0)
    sample = residual()
    found = rkmate.compare(sample.model, sample.args, budgets=[0.7], planners=["rockmate"], measure=True,
                           progress=False, settings=rkmate.Settings(costs="analytic", calls=2))
    row, eager, *_ = found
    one = rkmate.plan(sample.model, sample.args, budget=1.0, settings=rkmate.Settings(costs="analytic"),
                      progress=False)
    assert found.baseline_peak_bytes > 1.8 * one.baseline_peak_bytes
    assert row.budget_bytes == int(0.7 * found.baseline_peak_bytes)
    assert row.peak_bytes <= row.budget_bytes
    assert 0.8 * row.peak_bytes <= row.measured_peak_bytes <= row.budget_bytes
    assert eager.measured_peak_bytes == pytest.approx(found.baseline_peak_bytes, rel=0.1)
