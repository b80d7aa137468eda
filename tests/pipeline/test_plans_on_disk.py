"""Plans that another process searched for: found on disk, and judged again before they are used."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import rkmate
from rkmate.budget import Budget
from rkmate.pipeline import attempts, following
from rkmate.pipeline import search as planning
from rkmate.pipeline.prepare import Traced, trace
from rkmate.pipeline.search import make_plan
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import named
from rkmate.planners import default, save_set
from rkmate.planners.fit import Fitted
from rkmate.planners.settings import PlannerSettings
from rkmate.support.cache import keep_newest
from rkmate.support.progress import Progress
from tests.comparison.models import residual
from tests.pipeline.test_variants import OPTIONS, middle, own_peak, traced


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans in an empty cache."""
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(planning, "place_of", following.place_of)
    return tmp_path / "plans"


def planned(limit: int, when: str = "auto") -> tuple[rkmate.Plan, int]:
    """The plan within a budget, without what its making took, and how many times options were solved."""
    with mock.patch.object(attempts, "solve_lean", side_effect=attempts.solve_lean) as solve:
        found = make_plan(traced(when), Budget(bytes=limit), "rockmate")
    assert found.prepared.blocked.variant is named(found.plan.variant)
    return replace(found.plan, stage_seconds={}), solve.call_count


def limit_of() -> int:
    return int(own_peak() * 0.8)


def test_a_plan_is_searched_for_once(folder: Path) -> None:
    first, solved = planned(limit_of(), "never")
    assert solved and len(list(folder.iterdir())) == 1
    assert planned(limit_of(), "never") == (first, 0)


def test_a_variant_is_found_again_with_its_warning() -> None:
    limit = middle()
    with pytest.warns(rkmate.RkmateWarning, match="last bits differ") as said:
        first, _ = planned(limit)
    assert first.variant == "chunked-loss"
    with pytest.warns(rkmate.RkmateWarning, match="last bits differ") as again:
        assert planned(limit) == (first, 0)
    assert [str(w.message) for w in again] == [str(w.message) for w in said]


def test_another_budget_is_searched_for(folder: Path) -> None:
    planned(limit_of(), "never")
    _, solved = planned(limit_of() + 4096, "never")
    assert solved and len(list(folder.iterdir())) == 2


def test_a_step_that_fits_is_not_written(folder: Path) -> None:
    planned(own_peak(), "never")
    assert not folder.exists()


@pytest.mark.parametrize("edit", [
    {"peak_bytes": 1}, {"step_seconds": 0.0}, {"steps": [0]}, {"variant": "chunked-loss"}, {"runs": [3]},
    {"fingerprint": ""}, {"orders": None}])
def test_an_edited_entry_is_replaced(folder: Path, edit: dict[str, object]) -> None:
    first, _ = planned(limit_of(), "never")
    file, = folder.iterdir()
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | edit), encoding="utf-8")
    again, solved = planned(limit_of(), "never")
    assert solved and again == first
    assert json.loads(file.read_text(encoding="utf-8")) == content


def test_a_folder_that_cannot_be_written_costs_time_alone(folder: Path) -> None:
    folder.write_text("a file", encoding="utf-8")
    first, _ = planned(limit_of(), "never")
    again, solved = planned(limit_of(), "never")
    assert solved and again == first


def test_files_that_were_not_used_for_longest_go(tmp_path: Path) -> None:
    for k in range(8):
        file = tmp_path / f"{k}.json"
        file.write_text("x" * 100, encoding="utf-8")
        os.utime(file, (1000, 1000 + (k + 4) % 8))
    keep_newest(tmp_path, 800)
    assert len(list(tmp_path.iterdir())) == 8
    keep_newest(tmp_path, 799)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["0.json", "1.json", "2.json", "3.json", "7.json"]


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the clock of every further search jump on at each look, and nothing else find a smaller budget."""
    monkeypatch.setattr(default, "SMALLEST_TRIES", 3)

    def leap() -> None:
        clock = itertools.count(0, 10**6)
        for module in (default, save_set):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
            monkeypatch.setattr(module, "fit", lambda *how: Fitted(None, 0))
    return leap


@functools.cache
def chain() -> Traced:
    """A model whose blocks need far more than searches reach that have time."""
    sample = residual()
    settings = Settings(costs="analytic", options=OPTIONS, planner=PlannerSettings(smallest_seconds=1e4),
                        tiles="never")
    return trace(sample.model, sample.args, {}, settings, Progress(False))


def asked(limit: int) -> rkmate.Plan:
    return make_plan(chain(), Budget(bytes=limit), "rockmate").plan


def refused(limit: int) -> int:
    """The smallest budget that a refusal names."""
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        asked(limit)
    return error.value.minimum_bytes


def test_what_was_named_is_met_without_a_moment_to_search(folder: Path, hurry: Callable[[], None]) -> None:
    least = refused(1)
    file, = folder.iterdir()
    content = json.loads(file.read_text(encoding="utf-8"))
    hurry()
    assert refused(least - 1) == least
    plan = asked(least)
    assert plan.peak_bytes == plan.minimum_bytes == least
    assert asked(least + 64).peak_bytes <= least + 64
    for edit in ({"fingerprint": ""}, {"steps": [0]}):
        for each in folder.iterdir():
            each.unlink()
        file.write_text(json.dumps(content | edit), encoding="utf-8")
        assert refused(least) > least
