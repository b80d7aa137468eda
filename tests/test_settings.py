"""What a user may set, by whichever way it is said; and old names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.pipeline import prepare
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS, PLAIN, VARIANTS, first, named, others
from rkmate.planners import settings as planner_settings
from rkmate.planners.settings import PlannerSettings

ANALYTIC = Settings(costs="analytic")


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("measured")


@pytest.mark.parametrize("call", [rkmate.wrap, rkmate.plan])
def test_the_settings_say_where_costs_come_from(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    monkeypatch.setattr(prepare, "measure", never)
    call(model, (x,), budget=1.0, settings=ANALYTIC, progress=False)
    with pytest.raises(AssertionError, match="measured"):
        call(model, (x,), budget=1.0, progress=False)


def test_a_comparison_and_a_curve_take_the_settings_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    monkeypatch.setattr(prepare, "measure", never)
    rkmate.tradeoff(model, (x,), budgets=[1.0], settings=ANALYTIC, progress=False)
    found = rkmate.compare(model, (x,), budgets=[1.0], planners=["save-all"], settings=ANALYTIC,
                           progress=False)
    assert found.costs == "analytic"


def test_wrong_settings() -> None:
    with pytest.raises(rkmate.ArgumentError, match="chunked_loss is 'often'"):
        Settings(chunked_loss="often")  # type: ignore[arg-type]
    with pytest.raises(rkmate.ArgumentError, match="costs is 'guess'"):
        Settings(costs="guess")  # type: ignore[arg-type]


def test_the_old_name_of_chunked_loss() -> None:
    with pytest.warns(rkmate.RkmateWarning, match="now called chunked_loss") as caught:
        settings = Settings(split_head="never")
    assert caught[0].filename == __file__
    assert settings.chunked_loss == "never" and settings == Settings(chunked_loss="never")
    assert replace(settings, slots=7).chunked_loss == "never"      # without a warning


def test_kept_pages_are_no_setting_any_more() -> None:
    with pytest.warns(rkmate.RkmateWarning, match=r"now rkmate\.keep_pages\(\)") as caught:
        settings = Settings(keep_pages=False)
    assert caught[0].filename == __file__
    assert settings == Settings() and replace(settings, slots=7) == Settings(slots=7)      # without a warning


def test_the_old_name_of_a_planner() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    with pytest.warns(rkmate.RkmateWarning, match="now called 'save-set'") as caught:
        plan = rkmate.plan(model, (x,), budget=1.0, settings=replace(ANALYTIC, planner="keep-set"),
                           progress=False)
    assert plan.planner == "save-set" and caught[0].filename == __file__


def test_variants_in_their_order() -> None:
    head = {"chunked-loss": ("head",)}
    assert [v.name for v in VARIANTS] == ["plain", "chunked-loss", "grouped-loss",
                                         "channels-last", "tiles", "tiled-norms", "uncompiled"]
    assert first(Settings()) is PLAIN and others(Settings(), head) == (CHUNKED_LOSS,)
    assert others(Settings(), {"chunked-loss": ()}) == ()           # nothing to rewrite
    assert others(Settings(chunked_loss="never"), head) == ()
    always = Settings(chunked_loss="always")
    assert first(always) is CHUNKED_LOSS and others(always, head) == ()
    assert named("chunked-loss") is CHUNKED_LOSS and named("of another version") is PLAIN


def test_defaults_hold_inside_only() -> None:
    outside = planner_settings.DEFAULT.now()
    with planner_settings.DEFAULT.within(PlannerSettings(slots=3)):
        assert planner_settings.DEFAULT.now().slots == 3
        assert Settings(slots=5).of_planner.slots == 5
    assert planner_settings.DEFAULT.now() == outside
