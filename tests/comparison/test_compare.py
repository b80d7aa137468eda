"""One table of all planners: complete, right, and plain about what does not fit."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.cli.main import main
from rkmate.comparison import run
from rkmate.comparison.run import seconds_left
from rkmate.comparison.table import Row
from rkmate.errors import ArgumentError, MissingExtra
from rkmate.pipeline import prepare
from rkmate.pipeline.attempts import NEAR
from rkmate.planners.protocol import Outcome, Planner, Problem, infeasible, judged
from rkmate.planners.registry import PLANNERS
from rkmate.show.styles import LOOKS, OTHER, look_of
from tests.capturing import captured_once
from tests.clocks import NO_CLOCK
from tests.comparison.models import residual
from tests.options import options_of

pytestmark = pytest.mark.xdist_group("compare")
BUDGETS: list[int | float | str] = [1.0, "80%", 0.6, 1]
SAME_CANDIDATES = ("rotor", "revolve", "sequential", "chen", "lower-sets", "lower-sets-memory",
                   "lower-sets-exact", "lower-sets-exact-memory", "lower-sets-no-liveness", "dtr",
                   "save-all", "recompute-all")
"""Planners whose candidates do not depend on the budget."""


def compared(budgets: list[int | float | str], planners: list[str] | None = None,
             **options: Any) -> rkmate.Comparison:
    sample = residual()
    with captured_once("residual"):
        return rkmate.compare(sample.model, sample.args, budgets=budgets, planners=planners, time_limit=1.0,
                              progress=False, **options_of(costs="analytic", settings=NO_CLOCK, **options))


@pytest.fixture(scope="session")          # other modules' tests may come between
def whole() -> rkmate.Comparison:
    return compared(BUDGETS)


def test_every_planner_at_every_budget(whole: rkmate.Comparison) -> None:
    names = [n for n in PLANNERS if n != "auto"]
    top = whole.baseline_peak_bytes
    assert whole.budgets == (top, top * 80 // 100, int(top * 0.6), 1)
    assert [(r.budget_bytes, r.method) for r in whole] == [
        (b, n) for b in whole.budgets for n in names]
    for row in whole:
        assert row.planning_seconds is not None and row.budget_bytes is not None
        assert row.measured_peak_bytes is None and row.measured_ratio is None
        if row.status == "ok":
            assert row.peak_bytes is not None and row.peak_bytes <= row.budget_bytes
            assert row.time_ratio is not None and row.time_ratio >= 1 - 1e-9
        else:
            assert row.status in ("infeasible", "timeout") and row.peak_bytes is row.time_ratio is None


def test_rows_are_what_plan_returns(whole: rkmate.Comparison) -> None:
    sample = residual()
    budget = whole.budgets[2]
    for row in whole.at(budget):
        if row.status == "ok" and row.method in ("rockmate", *SAME_CANDIDATES):
            with captured_once("residual"):
                plan = rkmate.plan(sample.model, sample.args, budget=budget,
                                   progress=False, **options_of(settings=NO_CLOCK, planner=row.method,
                                                                costs="analytic"))
            near = row.method == "rockmate"         # it takes what is near the bound, without more options
            assert plan.peak_bytes == row.peak_bytes or (near and plan.peak_bytes <= budget)
            ratio = plan.step_seconds / plan.baseline_seconds
            assert ratio == pytest.approx(row.time_ratio) or (near and ratio <= row.time_ratio * (1 + NEAR))
    kept = {r.method: r for r in whole.at(whole.budgets[0])}["save-all"]
    assert kept.time_ratio == 1.0 and kept.peak_bytes == whole.baseline_peak_bytes


@pytest.mark.slow
def test_table(whole: rkmate.Comparison) -> None:
    text = str(whole)
    lines = text.splitlines()
    for name in whole.methods:
        assert sum(line[2:].split(" ")[0] == name for line in lines if line[:2] in ("  ", "* ")) \
            == len(whole.budgets), name
    impossible = [r for r in whole.at(1) if r.method != "checkmate-lp"]
    assert all(r.status == "infeasible" for r in impossible)
    tail = text[text.index("budget 1 B"):]
    assert tail.count("infeasible") >= len(impossible)
    assert "predicted peak" in text and "measured peak" not in text
    winners = [line for line in lines if line.startswith("* ") and "least" not in line]
    assert len(winners) == 3 and winners[0].startswith("* rockmate") and "1.000" in winners[0]
    assert whole.best(1) is None


def test_larger_budgets_are_never_slower() -> None:
    found = compared([0.5, 0.6, 0.7, 0.85, 1.0], list(SAME_CANDIDATES))
    for name in SAME_CANDIDATES:
        ratios = [r.time_ratio for r in found.of(name) if r.time_ratio is not None]
        assert ratios, name
        assert ratios == sorted(ratios, reverse=True), name
        fits = [r.status == "ok" for r in found.of(name)]
        assert fits == sorted(fits), name


@pytest.mark.slow
def test_what_is_found_for_one_budget_serves_the_larger_ones() -> None:
    """In whatever order the budgets come."""
    falling: list[int | float | str] = [1.0, 0.85, 0.7, 0.6, 0.5]
    found = compared(falling, ["rockmate", "save-set", "checkmate"])
    top = found.baseline_peak_bytes
    assert found.budgets == tuple(int(top * b) for b in (1.0, 0.85, 0.7, 0.6, 0.5))
    for name in found.methods:
        ratios = [r.time_ratio for r in found.of(name) if r.time_ratio is not None]
        assert len(ratios) >= 4 and ratios == sorted(ratios), name


class Moody:
    """Does its best with little memory only."""

    name = "moody"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        graph = problem.graph
        whole = judged(problem, range(len(graph.c)), graph.loss)
        if budget >= whole.peak:
            return infeasible("too much")
        name = "dtr" if budget < 0.7 * whole.peak else "recompute-all"
        return replace(PLANNERS[name].plan(problem, budget), bound=whole.seconds)


def test_a_planner_is_never_slower_with_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "moody", Moody())
    large, middle, small = compared([1.0, 0.8, 0.6], ["moody"])
    dtr, = compared([0.6], ["dtr"])
    assert small.time_ratio == middle.time_ratio == large.time_ratio == dtr.time_ratio
    assert small.note != middle.note == large.note == f"as within {small.budget_bytes:,} bytes"
    assert [r.status for r in (large, middle, small)] == ["ok"] * 3
    assert [r.planning_seconds is None for r in (large, middle, small)] == [False] * 3


@pytest.mark.slow
def test_those_that_ask_others_pay_for_their_own_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    attempted = run.attempted

    def counted(prepared: Any, solved: Any, method: Planner, limit: int, **more: Any) -> Any:
        asked.append((limit, method.name))
        return attempted(prepared, solved, method, limit, **more)

    monkeypatch.setattr(run, "attempted", counted)
    found = compared([0.8, 0.7], ["auto", "checkmate", "rockmate", "dtr", "save-set"])
    large, small = found.budgets
    order = ["dtr", "save-set", "rockmate", "checkmate", "auto"]
    assert asked == [(small, name) for name in order] + [(large, name) for name in order]
    assert [r.method for r in found] == ["auto", "checkmate", "rockmate", "dtr", "save-set"] * 2


def test_where_the_default_is_beaten() -> None:
    def row(method: str, budget: int, ratio: float | None) -> Row:
        return Row(method, budget, "ok" if ratio else "infeasible", 0.1, 1, ratio)

    rows = (row("rockmate", 9, 1.2), row("dtr", 9, 1.1), row("rockmate", 8, 1.3), row("dtr", 8, 1.3),
            row("rockmate", 7, None), row("dtr", 7, 1.5))
    found = rkmate.Comparison(rows, "M", "analytic", 10, 1.0, {})
    assert found.beaten() == ((rows[0], rows[1]), (rows[4], rows[5]))
    assert found.beaten("dtr") == ()
    assert found.best(8) == rows[2]


def test_json_and_picture(whole: rkmate.Comparison, tmp_path: Path,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(whole.to_json())
    assert len(content["rows"]) == len(whole)
    assert content["rows"][0]["method"] == "rockmate" and content["costs"] == "analytic"
    whole.plot(tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text(encoding="utf-8")
    assert all(f">{name}</text>" in drawn for name in whole.methods
               if any(r.status == "ok" for r in whole.of(name)))
    whole.plot(tmp_path / "two.svg", methods=["rockmate", "dtr"])
    assert ">chen</text>" not in (tmp_path / "two.svg").read_text(encoding="utf-8")
    with pytest.raises(ArgumentError, match="methods names 'best'"):
        whole.plot(methods=["best"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"rkmate\[plots\]"):
        whole.plot()


def test_each_method_has_a_look_of_its_own() -> None:
    assert set(PLANNERS) <= set(LOOKS)
    looks = list(LOOKS.values())
    for a, b in itertools.combinations(looks, 2):
        assert math.dist(lab(a.colour), lab(b.colour)) > 18, (a, b)
        assert (a.marker, a.line) != (b.marker, b.line)
    assert all(lab(look.colour)[0] < 75 for look in looks)          # on white
    assert look_of("checkpoint_sequential 4") == look_of("checkpoint_sequential") != look_of("sequential")
    assert look_of("rkmate 0.5") == look_of("rockmate")
    assert look_of("a planner of one's own") == OTHER not in looks


def lab(colour: str) -> tuple[float, float, float]:
    """A colour where distances are as large as they look (CIE 1976)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                        for c in (int(colour[k:k + 2], 16) / 255 for k in (1, 3, 5)))
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_methods_look_alike_in_every_picture() -> None:
    rows = tuple(Row(name, 10, "ok", 0.1, 10, 1.1, 11, 1.2) for name in ("chen", "dtr", "rockmate"))
    found = rkmate.Comparison(rows, "M", "analytic", 10, 1.0, {})
    for methods in (["chen", "dtr", "rockmate"], ["dtr"]):
        axes = found.plot(methods=methods).axes[0]
        for line in axes.lines:
            if line.get_label() in methods:
                look = look_of(line.get_label())
                assert (line.get_color(), line.get_marker(), line.get_linestyle()) == \
                    (look.colour, look.marker, look.line)
        hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
        assert len(hollow) == len(methods) + 1                      # and the one in the legend


def test_the_time_left_is_that_of_each_method() -> None:
    assert seconds_left([], ["dtr"]) is None
    done = [("dtr", 1.0), ("checkmate", 19.0), ("dtr", 3.0)]
    assert seconds_left(done, ["dtr", "checkmate"]) == pytest.approx(2.0 + 19.0)
    assert seconds_left(done, ["rotor"]) == pytest.approx(23 / 3)
    assert seconds_left(done, []) == 0


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"budgets is 0\.5"):
        compared(0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="planner is 'best'"):
        compared([0.5], ["best"])
    sample = residual()
    with pytest.raises(ArgumentError, match="time_limit is 0"):
        rkmate.compare(sample.model, sample.args, time_limit=0)
    for wrong in ([], 0.5, "50%"):
        with pytest.raises(ArgumentError, match="should be a list of budgets"):
            rkmate.compare(sample.model, sample.args, budgets=wrong)
        with pytest.raises(ArgumentError, match="should be a list of budgets"):
            rkmate.tradeoff(sample.model, sample.args, budgets=wrong)
    for planners in ((), "rotor"):
        with pytest.raises(ArgumentError, match="should be a list of names of planners"):
            rkmate.compare(sample.model, sample.args, planners=planners)
    with pytest.raises(ArgumentError, match="costs is 'free'"):
        rkmate.compare(sample.model, sample.args,
                       settings=rkmate.Settings(costs="free"))  # type: ignore[arg-type]


def target() -> tuple[Any, ...]:
    """What the command line is given."""
    sample = residual()
    return sample.model, sample.args


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = f"{__name__}:target"
    common = ["compare", name, "--analytic", "--quiet", "--planners", "rockmate", "save-all"]
    assert main([*common, "--budgets", "100%", "70%", "--plot", str(tmp_path / "p.svg")]) == 0
    told = capsys.readouterr().out
    assert told.count("rockmate") == 2 and "infeasible" in told and (tmp_path / "p.svg").exists()
    assert main([*common, "--budgets", "70%", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["method"], r["status"]) for r in rows] == [
        ("rockmate", "ok"), ("save-all", "infeasible")]
    assert main([*common, "--budgets", "lots"]) == 2
    capsys.readouterr()
    assert main([*common, "--budgets", "auto"]) == 2         # what is free on a device, which is none
    assert "asks the CUDA device" in capsys.readouterr().err


class Wide(nn.Module):
    """Thirteen branches: more lower sets than the exact family takes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum()


def test_a_planner_without_any_schedule_for_a_model() -> None:
    torch.manual_seed(0)
    model, args = Wide(), (torch.randn(8, 4),)
    with pytest.raises(ArgumentError, match=r"lower-sets-exact.* at any budget: .* lower sets"):
        rkmate.plan(model, args, budget=1.0,
                    settings=rkmate.Settings(planner="lower-sets-exact", costs="analytic"), progress=False)
    row, = rkmate.compare(model, args, budgets=[1.0], planners=["lower-sets-exact"],
                          settings=rkmate.Settings(costs="analytic"), progress=False)
    assert row.status == "infeasible" and "lower sets" in row.note and row.note in str(
        rkmate.Comparison((row,), "Wide", "analytic", 10, 1.0, {}))


def test_planning_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = residual()
    monkeypatch.setattr(prepare, "LEAST_SECONDS", 0.0)
    with pytest.raises(ArgumentError, match="planning_seconds is -1"):
        rkmate.plan(sample.model, sample.args, budget=0.7, settings=rkmate.Settings(planning_seconds=-1),
                    progress=False)
    with pytest.raises(rkmate.PlanningTimeout, match="checkmate-lp found no schedule"):
        rkmate.plan(sample.model, sample.args, budget=0.7,
                    settings=rkmate.Settings(planner="checkmate-lp", costs="analytic", planning_seconds=1e-9),
                    progress=False)
