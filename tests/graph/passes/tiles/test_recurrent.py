"""Recurrent layers in segments of their sequence, the state carried."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_peak
from rkmate.pipeline.settings import Settings
from tests.capturing import captured_once

ANALYTIC = Settings(costs="analytic", tiles="auto")
NEVER, ALWAYS = (replace(ANALYTIC, tiles=when) for when in ("never", "always"))


class Sequences(nn.Module):
    """A recurrent stack between two products, and a loss of its outputs and last states."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.recurrent: nn.RNNBase = getattr(nn, kind)(16, 32, **options)
        self.leave = nn.Linear(64 if self.recurrent.bidirectional else 32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, states = self.recurrent(torch.tanh(self.enter(x)))
        last = states if isinstance(states, torch.Tensor) else states[0] * states[1]
        return (self.leave(y) - x).square().mean() + last.square().mean()


def _like_exact(model: nn.Module, run: nn.Module, x: torch.Tensor) -> None:
    """The loss and the gradients of a run are the model's in float64, as near as float32 is."""
    exact = copy.deepcopy(model).cpu().double()
    loss, expected = run(x), exact(x.cpu().double())
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu().double(), q.grad, rtol=1e-4, atol=1e-6, msg=name)


def _segments(kind: str, wrapped: rkmate.PlannedModule) -> int:
    """Return how many segments of a layer the source has."""
    return wrapped.source.count("recurrent_layer(" if kind == "LSTM" else "recurrent_steps(")


@pytest.mark.parametrize(("kind", "options"), [
    ("LSTM", {}), ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("GRU", {"bidirectional": True, "batch_first": True}), ("RNN", {"bias": False})])
def test_segments_have_the_originals_gradients(kind: str, options: Any) -> None:
    torch.manual_seed(0)
    model, x = Sequences(kind, **options), torch.randn(131, 4, 8)
    x = x.transpose(0, 1).contiguous() if options.get("batch_first") else x
    wrapped = rkmate.wrap(model, (x,), budget=1.0, settings=ALWAYS, progress=False)
    assert "run in tiles" in wrapped.plan.note
    assert _segments(kind, wrapped) >= 4 * len(model.recurrent.all_weights)
    _like_exact(model, wrapped, x)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_budget_holds_the_workspace_of_a_segment(kind: str) -> None:
    model, x = Sequences(kind), torch.randn(259, 4, 8)
    with captured_once():
        with pytest.raises(rkmate.InfeasibleBudget):
            rkmate.wrap(model, (x,), budget=0.7, settings=NEVER, progress=False)
        with pytest.warns(rkmate.RkmateWarning, match=r"run in tiles.*last bits"):
            wrapped = rkmate.wrap(model, (x,), budget=0.7, settings=ANALYTIC, progress=False)
    assert _segments(kind, wrapped) >= 4
    wrapped(x).backward()
    assert measure_peak(lambda: wrapped(x).backward()).peak <= wrapped.plan.budget_bytes


def test_a_short_sequence_stays_whole() -> None:
    plan = rkmate.plan(Sequences(), (torch.randn(40, 4, 8),), budget=1.0, progress=False,
                       settings=ALWAYS)
    assert "recurrent" not in plan.note


@pytest.mark.gpu
@pytest.mark.values
@pytest.mark.parametrize(("kind", "options"), [
    ("LSTM", {"batch_first": True}), ("GRU", {"num_layers": 2}), ("LSTM", {"num_layers": 2})])
def test_cudnns_layers_run_in_segments(kind: str, options: Any) -> None:
    torch.manual_seed(0)
    model = Sequences(kind, **options).cuda()
    x = torch.randn(4, 128, 8) if options.get("batch_first") else torch.randn(128, 4, 8)
    with pytest.warns(rkmate.RkmateWarning, match="run in tiles"):
        wrapped = rkmate.wrap(model, (x.cuda(),), budget=0.8, settings=ANALYTIC, progress=False)
    _like_exact(model, wrapped, x.cuda())
