"""Pictures drawn with matplotlib: what is on them, and the error without it."""

from __future__ import annotations

import builtins
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

import rkmate
from rkmate.ir.simulate import Peak
from rkmate.show.replay import KIND_NAMES, KINDS, label, replay, short_path
from rkmate.show.timeline import block_schedule
from tests.show.models import curve, in_one_process, scores_plan, tower, wrapped

pytestmark = in_one_process

MIB = 1 << 20


def legend(axes: Any) -> list[str]:
    return [t.get_text() for t in axes.get_legend().get_texts()]


def test_the_timeline_is_the_replay(tmp_path: Path) -> None:
    plan = wrapped().plan
    figure = plan.plot(tmp_path / "time.svg")
    ElementTree.parse(tmp_path / "time.svg")
    top, bottom = figure.axes
    replayed = replay(plan)
    tops = [max(v for path in c.get_paths() for v in path.vertices[:, 1]) for c in top.collections]
    assert max(tops) == pytest.approx(plan.peak_bytes / MIB)
    used = {KIND_NAMES[k] for n, k in enumerate(KINDS)
            if max(m.bytes[n] for m in replayed.moments) > plan.peak_bytes / 1000}
    assert len(used) >= 3
    assert set(KIND_NAMES.values()) & set(legend(top)) == used
    budget = next(line for line in top.lines if str(line.get_label()).startswith("budget"))
    assert budget.get_ydata()[0] == pytest.approx(plan.budget_bytes / MIB)
    assert {t.get_text() for t in top.texts} == {"forward", "backward"}
    assert [t.get_text().split() for t in bottom.get_yticklabels()] == \
        [[info.path, f"{info.label}{b}"] for b, info in enumerate(plan.blocks)]


def test_the_measured_timeline_is_drawn_on_top() -> None:
    plan = wrapped().plan
    measured = Peak(3 * MIB, 0, 0.5, None, ((0.1, MIB), (0.2, 3 * MIB), (0.5, 0)))
    top = plan.plot(measured=measured).axes[0]
    line = next(line for line in top.lines if str(line.get_label()).startswith("measured"))
    assert max(line.get_ydata()) == 3
    assert line.get_xdata()[-1] == pytest.approx(replay(plan).seconds * 1e3)


def test_the_plain_step_is_outlined_where_it_leaves_room_for_the_rest() -> None:
    half, full, least = wrapped().plan, curve()[0], curve()[-1]
    outlines = [next((line for line in plan.plot().axes[0].lines
                      if str(line.get_label()).startswith("without")), None)
                for plan in (half, full, least)]
    assert max(outlines[0].get_ydata()) == pytest.approx(half.baseline_peak_bytes / MIB)
    assert outlines[1] is None
    assert (outlines[2] is not None) == (least.baseline_peak_bytes <= 5 * least.budget_bytes)


def test_a_wrapped_step_is_measured_as_the_budget_counts_it() -> None:
    module = wrapped()
    _, args = tower(4)
    before = [p.detach().clone() for p in module.parameters()]
    measured = rkmate.measure_step(module, lambda: module(*args).backward())
    assert measured.peak == pytest.approx(module.plan.peak_bytes, rel=0.02)
    assert measured.timeline
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert any(str(line.get_label()).startswith("measured")
               for line in module.plan.plot(measured=measured).axes[0].lines)


def test_gradients_stay_as_they_were_after_a_measured_step() -> None:
    layer = torch.nn.Linear(4, 4)
    layer.weight.grad = torch.ones(4, 4)
    rkmate.measure_step(layer, lambda: layer(torch.ones(2, 4)).sum().backward())
    assert torch.equal(layer.weight.grad, torch.ones(4, 4))
    assert layer.bias.grad is None


def test_a_loss_outside_has_a_place_in_the_timeline() -> None:
    assert KIND_NAMES["loss"] in legend(scores_plan().plot().axes[0])


def test_a_blocks_schedule_shows_its_tensors(tmp_path: Path) -> None:
    plan = wrapped().plan
    path = plan.draw(tmp_path / "schedule.svg", "schedule", 1)
    ElementTree.parse(path)
    axes = block_schedule(plan, 1, replay(plan)).axes[0]
    g = plan.graph
    mine = g.block_c[1]
    made = [j for i in mine for j in g.cd.c[i].outputs if g.cd.d[j].size]
    assert len(axes.get_yticklabels()) == len(made)
    runs = [i for i in plan.schedule.order if i in set(mine)]
    assert [t.get_text() for t in axes.get_xticklabels()] == \
        [label(short_path(g.computations[i].path, plan.blocks[1].path), g.computations[i].operation)
         for i in runs]


def test_the_curve_has_every_plan_and_point(tmp_path: Path) -> None:
    plans = curve().with_point("checkpoint", 2 * MIB, 1.5 * curve()[0].baseline_seconds)
    figure = plans.plot(tmp_path / "curve.png", here=curve()[3])
    assert (tmp_path / "curve.png").stat().st_size > 1000
    axes = figure.axes[0]
    line = next(line for line in axes.lines if line.get_label() == "rockmate")
    assert sorted(line.get_xdata()) == sorted(p.peak_bytes / MIB for p in curve())
    point = next(line for line in axes.lines if line.get_label() == "checkpoint")
    assert list(point.get_ydata()) == [pytest.approx(50)]


def test_a_curve_is_a_sequence_of_plans() -> None:
    plans = curve()
    assert len(plans) == 10
    assert plans[0].peak_bytes == plans[0].baseline_peak_bytes
    assert plans[-1].peak_bytes == plans[-1].minimum_bytes
    assert [p.step_seconds for p in plans] == sorted(p.step_seconds for p in plans)
    assert len(str(plans).splitlines()) == 11
    assert plans._repr_html_().count("<tr>") == 11
    assert plans[2:4] == plans.plans[2:4]
    assert "\n" not in repr(plans)


def test_an_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(rkmate.ArgumentError, match="suffix"):
        curve().plot(tmp_path / "curve.gif")


@pytest.mark.parametrize("draw", [lambda: wrapped().plan.plot(), lambda: curve().plot(),
                                  lambda: wrapped().plan.draw("a.svg", "schedule", 0)])
def test_without_matplotlib_the_error_names_the_extra(draw: Any, monkeypatch: pytest.MonkeyPatch,
                                                      tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(rkmate.MissingExtra, match=r"rkmate\[plots\]"):
        draw()
    # A page and a notebook need no matplotlib.
    assert wrapped().plan.report("a.html", curve=curve()).exists()
    assert "<svg" in wrapped().plan._repr_html_() and "<svg" in curve()._repr_html_()
