"""``planning_seconds``: the time of a call, from its capture to its plan."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkmate.budget import Budget
from rkmate.ilp.cache import OptionCache
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.solve_all import solve_options
from rkmate.pipeline import search as planning
from rkmate.pipeline import solve as solving
from rkmate.pipeline.attempts import Planned
from rkmate.pipeline.prepare import LEAST_SECONDS, Traced, prepare
from rkmate.pipeline.search import make_curve, make_plan
from tests.pipeline.test_variants import least, middle, own_peak, traced


def within(seconds: float | None, capture: float = 0.0) -> Traced:
    """The model, its capture said to have taken `capture` seconds."""
    here = traced()
    return replace(here, settings=replace(here.settings, planning_seconds=seconds), seconds=capture)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Limits of the options, in seconds, and variants that are prepared, in order."""
    found: list[Any] = []

    def options(*of: Any, seconds: float | None, **how: Any) -> Any:
        found.append(seconds)
        return solve_options(*of, seconds=seconds, **how)

    def prepared(*of: Any, **how: Any) -> Any:
        found.append(how["blocked"].variant.name)
        return prepare(*of, **how)

    monkeypatch.setattr(solving, "solve_options", options)
    monkeypatch.setattr(planning, "prepare", prepared)
    return found


def plan_of(here: Traced, limit: int) -> Planned:
    return make_plan(here, Budget(bytes=limit), "rockmate")


def test_after_a_long_capture_the_first_plan_is_taken(asked: list[Any]) -> None:
    plan = plan_of(within(10.0, capture=20.0), middle()).plan
    assert asked[-1:] == ["plain"] and plan.variant == "plain" and plan.peak_bytes <= middle()
    assert plan.note.endswith("planning_seconds left no time for chunked-loss")


def test_what_nothing_else_meets_is_planned_however_late() -> None:
    with pytest.warns(match="nothing fits in this budget"):
        plan = plan_of(within(10.0, capture=20.0), least("auto")).plan
    assert plan.variant == "chunked-loss" and plan.peak_bytes <= least("auto")


@pytest.mark.filterwarnings("ignore::rkmate.RkmateWarning")
def test_with_time_enough_the_plan_is_that_without_a_limit(asked: list[Any]) -> None:
    without = plan_of(within(None), middle()).plan
    assert asked.count(None) >= 1
    plan = plan_of(within(1e6), middle()).plan
    assert plan.schedule == without.schedule and plan.variant == without.variant != "plain"
    assert all(4e5 < s <= 5e5 for s in asked if isinstance(s, float))


def test_the_capture_counts() -> None:
    begin = time.perf_counter()
    until = within(10.0, capture=4.0).timed().until
    assert begin + 6.0 <= until <= time.perf_counter() + 6.0
    assert within(10.0, capture=20.0).timed().seconds_left == LEAST_SECONDS
    assert within(None).timed().seconds_left is None and math.isinf(within(None).timed().until)


def test_each_budget_of_a_curve_has_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    attempted = planning.attempted

    def noted(prepared: Any, *of: Any, **how: Any) -> Any:
        limits.append(prepared.blocked.traced.seconds_left)
        return attempted(prepared, *of, **how)

    monkeypatch.setattr(planning, "attempted", noted)
    here = replace(within(50.0, capture=60.0), settings=replace(
        within(50.0).settings, chunked_loss="never"))
    make_curve(here, [Budget(bytes=own_peak() - k) for k in (1, 4096)], "rockmate")
    assert limits == [50.0, 50.0]


def test_options_that_lack_the_time_of_one_call_are_not_stored(tmp_path: Path) -> None:
    graphs = prepare(traced()).class_graphs
    cache, settings = OptionCache(tmp_path), OptionSettings(grid=(3, 3))
    short = solve_options(graphs, settings, cache=cache, seconds=0.0)
    cut = [o for o in short if o.timed_out]
    assert cut and not any(o.solves for o in short)
    stored = len(list((tmp_path / "options").iterdir())) if (tmp_path / "options").exists() else 0
    full = solve_options(graphs, settings, cache=cache)
    assert len(list((tmp_path / "options").iterdir())) > stored
    assert any(o.solves for o in full)
