"""Layouts that are measured in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ir.cd import Cost
from rkmate.measure.remembered import CostMemory
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline import search as in_turns
from rkmate.pipeline.prepare import Blocked, block, measured_costs, prepare, trace
from rkmate.pipeline.variants import CHANNELS_LAST, PLAIN, TILES
from rkmate.support.progress import Progress

IMAGES = torch.randn(2, 8, 12, 12)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())


@pytest.fixture(name="asked")
def _asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is measured, by names of variants; with nothing known before."""
    found: list[str] = []

    def named(blocked: Blocked, *args: Any) -> Any:
        found.append(blocked.variant.name)
        return measured_costs(blocked, *args)

    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(in_turns, "measured_costs", named)
    return found


def plan(**settings: Any) -> rkmate.Plan:
    return rkmate.plan(network(), (IMAGES,), budget=1.0, progress=False, settings=rkmate.Settings(**settings))


def test_each_is_measured_before_either_is_measured_again(asked: list[str]) -> None:
    plan(layouts="auto")
    assert asked == ["plain", "channels-last"] * 2
    plan(layouts="auto")                                     # what is remembered is not measured again
    assert len(asked) == 4
    rkmate.tradeoff(network(), (IMAGES,), budgets=[1.0], progress=False,
                    settings=rkmate.Settings(layouts="auto"))
    assert len(asked) == 4


@pytest.mark.parametrize("settings", [{"layouts": "keep"}, {"layouts": "channels_last"},
                                      {"layouts": "auto", "costs": "analytic"}], ids=str)
def test_there_is_nothing_to_measure_in_turns(asked: list[str], settings: dict[str, Any]) -> None:
    plan(**settings)
    assert not asked


def test_the_median_counts_and_the_most_bytes(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([(5.0, 10), (1.0, 40), (2.0, 30), (3.0, 20), (4.0, 5), (9.0, 6)])     # the two in turns

    def measured_costs(blocked: Blocked, memory: CostMemory, settings: MeasureSettings, limit: Any) -> None:
        run = Cost(*next(runs))
        for text, count in in_turns._texts(blocked):
            memory.put(text, *in_turns._measured_on(blocked, settings), (run,) * count)

    monkeypatch.setattr(in_turns, "measured_costs", measured_costs)
    settings = rkmate.Settings(layouts="auto", measure=MeasureSettings(passes=3))
    traced = trace(network(), (IMAGES,), {}, settings, Progress(False))
    plain, tiled = block(traced), block(traced, TILES)       # of a third variant, nothing is asked
    blocks = {plain.variant: plain, tiled.variant: tiled}
    assert in_turns.measure_in_turns(blocks) > 0
    assert [v.name for v in blocks] == ["plain", "tiles", "channels-last"]
    found = [set(prepare(traced, blocked=blocks[v]).costs.values()) for v in (PLAIN, CHANNELS_LAST)]
    assert found == [{Cost(4.0, 30)}, {Cost(3.0, 40)}]
