"""Plans that compute something again to have room for larger tiles, by times that are made up."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import rkmate
from rkmate.ir.cd import Cost, Kernel
from rkmate.ir.kernels import by_own_kernels
from rkmate.ir.schedule import Compute
from rkmate.pipeline import attempts
from rkmate.pipeline import search as planning
from rkmate.pipeline.attempts import Found, fastest_plan, in_larger_tiles, leaner_left_out
from rkmate.pipeline.prepare import Prepared, Traced, block, trace, with_operation_costs
from rkmate.pipeline.search import make_curve, plan_prepared
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS
from rkmate.planners.registry import planner
from rkmate.planners.settings import PlannerSettings
from rkmate.support.progress import Progress
from tests.pipeline.test_variants import OPTIONS, WORDS, _Model

SETTINGS = Settings(costs="analytic", options=OPTIONS, chunked_loss="always",
                    planner=PlannerSettings(first_seconds=0, save_set_seconds=0, smallest_seconds=0))


@functools.cache
def traced(calls: int = 1, seconds: float | None = None) -> Traced:
    torch.manual_seed(0)
    inputs = torch.randn(512, 64), torch.randint(0, WORDS, (512,))
    settings = replace(SETTINGS, calls=calls, planning_seconds=seconds)
    return trace(_Model(2), inputs, {}, settings, Progress(False))


def with_slow_tiles(tiles: float, calls: int = 1, seconds: float | None = None) -> Prepared:
    """Its head takes so many times as long as all else in small tiles, and no time in large ones."""
    blocked = block(traced(calls, seconds), CHUNKED_LOSS)
    costs = [c._replace(alternatives=()) for _, c in sorted(with_operation_costs(blocked).costs.items())]
    plain = with_operation_costs(blocked)
    head, = (i for i, c in enumerate(plain.graph.c) if c.alternatives)
    others = plain.costs[head].alternatives
    rest = sum(c.time for i, c in enumerate(costs) if i != head)
    costs[head] = Cost(tiles * rest, costs[head].overhead, tuple(
        other._replace(time=tiles * rest / 4 ** (k + 1)) for k, other in enumerate(others)))
    return with_operation_costs(blocked, costs)


def room_for_small_tiles(prepared: Prepared) -> int:
    """What the step takes by its own kernels."""
    return prepared.simulate(by_own_kernels(prepared.whole)).peak


def kernels(plan: rkmate.Plan) -> list[int]:
    return [s.kernel for s in plan.schedule.steps if isinstance(s, Compute) and s.kernel]


def test_something_is_computed_again_for_them() -> None:
    prepared = with_slow_tiles(4.0)
    limit = room_for_small_tiles(prepared)
    whole = prepared.simulate(prepared.with_kernels(prepared.whole, limit))
    plan = plan_prepared(prepared, limit)
    assert whole.peak <= limit and kernels(plan) and plan.schedule.recomputed()
    assert plan.step_seconds < 0.7 * whole.seconds
    assert prepared.simulate(plan.schedule).peak == plan.peak_bytes <= limit
    assert plan.step_seconds == pytest.approx(prepared.simulate(plan.schedule).seconds)
    assert plan.bound_seconds is not None and plan.bound_seconds <= plan.step_seconds
    assert "larger tiles" in plan.stage_seconds


def test_a_search_in_larger_tiles_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all options of blocks are solved afterwards, and the plan is looked for in tiles again."""
    prepared, method, asked = with_slow_tiles(4.0), planner("rockmate"), list[Prepared]()
    limit, searched = room_for_small_tiles(prepared), attempts._whole_or_searched

    def watched(here: Prepared, *rest: Any) -> Any:
        asked.append(here)
        return searched(here, *rest)

    monkeypatch.setattr(attempts, "_whole_or_searched", watched)
    found = fastest_plan(prepared, method, limit)
    assert isinstance(found, Found)
    again = in_larger_tiles(replace(found, planned=replace(found.planned, plan=replace(
        found.plan, schedule=prepared.whole, step_seconds=prepared.baseline.seconds))), method, limit)
    assert again.plan.step_seconds == found.plan.step_seconds < prepared.baseline.seconds
    assert len(asked) == len(set(asked)) > 1


def test_another_library_is_no_larger_tile() -> None:
    prepared = with_slow_tiles(4.0)
    head, = (i for i, c in enumerate(prepared.graph.c) if c.alternatives)
    own = prepared.costs[head]
    others = own.alternatives
    by_other = Kernel(0.9 * own.time, own.overhead + 64)
    costs = [c for _, c in sorted(prepared.costs.items())]
    costs[head] = own._replace(alternatives=(by_other, *others))
    both = with_operation_costs(prepared.blocked, costs)
    for level in range(1, len(others) + 1):
        left = [leaner_left_out(each, (head,), level).costs[head] for each in (prepared, both)]
        assert left[0] == left[1] and left[0].overhead == others[level - 1].overhead


def test_not_where_no_time_is_left() -> None:
    prepared = with_slow_tiles(4.0, seconds=1e-9)
    plan = plan_prepared(prepared, room_for_small_tiles(prepared))
    assert not plan.schedule.recomputed() and "larger tiles" not in plan.stage_seconds


def test_not_where_tiles_cost_little() -> None:
    prepared = with_slow_tiles(0.001)
    plan = plan_prepared(prepared, room_for_small_tiles(prepared))
    assert not plan.schedule.recomputed() and "larger tiles" not in plan.stage_seconds


def test_several_calls_are_planned_by_their_leanest_kernels() -> None:
    prepared = with_slow_tiles(4.0, calls=2)
    plan = plan_prepared(prepared, prepared.baseline_peak)
    assert plan.calls == 2 and not plan.schedule.recomputed()


def test_curves_have_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = with_slow_tiles(4.0)
    limit = room_for_small_tiles(prepared)
    monkeypatch.setattr(planning, "prepare", lambda *args, **more: prepared)
    found, = make_curve(traced(), [rkmate.budget.Budget(bytes=limit)], "rockmate")
    assert found.step_seconds == pytest.approx(plan_prepared(prepared, limit).step_seconds)
    assert found.schedule.recomputed() and found.peak_bytes <= limit
