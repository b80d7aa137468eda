"""The seconds of a plan's stages are parts of what planning took: none is counted twice, or left out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline import attempts, prepare
from rkmate.pipeline import solve as chains
from rkmate.pipeline.settings import Settings

X = torch.randn(8, 16)
SETTINGS = Settings(costs="analytic", options=OptionSettings(grid=(2, 2), time_limit=0.2, block_limit=1.0))
STAGES = {"capture": (prepare, "capture"), "cut": (prepare, "partition"),
          "measure": (prepare, "analytic_costs"), "options": (chains, "solve_options"),
          "chain": (chains, "chain_of"), "search": (attempts, "ask")}
"""What each stage spends its time in."""


class _Clock:
    """Stands still but where it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spent = dict.fromkeys(STAGES, 0.0)

    def __call__(self) -> float:
        return self.now

    def later(self, stage: str, seconds: float, fn: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            self.spent[stage] += seconds
            return fn(*args, **kwargs)
        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """Each stage takes its own power of two of seconds, wherever it is called from."""
    result = _Clock()
    for k, (stage, (module, name)) in enumerate(STAGES.items()):
        monkeypatch.setattr(module, name, result.later(stage, 2.0**k, getattr(module, name)))
    monkeypatch.setattr(time, "perf_counter", result)
    return result


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))


def test_each_stage_counts_once(clock: _Clock) -> None:
    for budget in (1.0, 0.7):
        begin, before = clock.now, dict(clock.spent)
        plan = rkmate.plan(_model(), (X,), budget=budget, settings=SETTINGS, progress=False)
        assert sum(plan.stage_seconds.values()) == clock.now - begin
        assert plan.stage_seconds == {stage: clock.spent[stage] - before[stage]
                                      for stage in plan.stage_seconds}


def test_further_budgets_share_all_but_the_search(clock: _Clock) -> None:
    curve = rkmate.tradeoff(_model(), (X,), budgets=(0.8, 0.7), settings=SETTINGS, progress=False)
    shared, *others = ({k: v for k, v in p.stage_seconds.items() if k != "search"} for p in curve)
    assert others == [shared]
    searches = {p.stage_seconds["search"] for p in curve}
    assert searches == {2.0**list(STAGES).index("search")}
    assert sum(shared.values()) + 2 * searches.pop() == clock.now


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 600)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(x).relu()), y)


def test_variants_that_did_not_fit_are_counted(clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.device.cpu import Cpu
    monkeypatch.setattr(Cpu, "part_bytes", lambda self, total: 2048)
    inputs = (torch.randn(64, 16), torch.randint(0, 600, (64,)))
    with pytest.raises(rkmate.InfeasibleBudget) as refused:
        rkmate.plan(_Head(), inputs, budget=1, settings=SETTINGS, progress=False)
    begin = clock.now
    with pytest.warns(rkmate.RkmateWarning):
        plan = rkmate.plan(_Head(), inputs, budget=refused.value.minimum_bytes, settings=SETTINGS,
                           progress=False)
    assert plan.variant != "plain"
    assert sum(plan.stage_seconds.values()) == clock.now - begin
