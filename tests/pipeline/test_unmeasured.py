"""Budgets that are refused before anything is measured, on a small model: every step is long, and every graph
deep."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import rkmate
from rkmate.budget import Budget
from rkmate.measure.analytic import analytic_costs
from rkmate.pipeline import prepare as preparing
from rkmate.pipeline import refuse as smallest
from rkmate.pipeline import refuse as unmeasured
from rkmate.pipeline.prepare import Blocked, Traced, block, prepare, trace
from rkmate.pipeline.refuse import bytes_of_any, refuse_unmeasured, refused_as_it_is
from rkmate.pipeline.search import make_plan, plan_prepared
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS, PLAIN, others
from rkmate.planners.registry import planner
from rkmate.planners.settings import PlannerSettings
from rkmate.support.progress import Progress
from tests.models import BANK
from tests.pipeline.test_variants import OPTIONS, WORDS, _Model

PLANNER = PlannerSettings(first_seconds=0, save_set_seconds=1e4, smallest_seconds=0, deep_nodes=1)
METHOD = planner("rockmate", PLANNER)


@pytest.fixture(autouse=True)
def every_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmeasured, "LONG", 0.0)


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured: the numbers are those that are counted."""
    measured: list[Any] = []

    def counted(parts: Any, *args: Any, **kwargs: Any) -> Any:
        measured.append(parts)
        return analytic_costs(parts)

    monkeypatch.setattr(preparing, "measure", counted)
    return measured


@functools.cache
def traced(costs: Any = "measured", words: int = WORDS) -> Traced:
    torch.manual_seed(0)
    inputs = torch.randn(512, 64), torch.randint(0, words, (512,))
    settings = Settings(costs=costs, options=OPTIONS, planner=PLANNER)
    return trace(_Model(2), inputs, {}, settings, Progress(False))


@functools.cache
def least(when: Any) -> int:
    """The smallest budget that is met by counted costs, found the slow way."""
    here = traced("analytic")
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        make_plan(replace(here, settings=replace(here.settings, chunked_loss=when)), Budget(bytes=1),
                  "rockmate")
    return error.value.minimum_bytes


@pytest.mark.filterwarnings("ignore:nothing fits in this budget:rkmate.RkmateWarning")
def test_a_clear_answer_takes_no_measuring(nothing_is_measured: list[Any]) -> None:
    with pytest.raises(rkmate.InfeasibleBudget, match=r"at least .* Nothing was measured") as error:
        make_plan(traced(), Budget(bytes=1000), "rockmate")
    assert not nothing_is_measured
    low = error.value.minimum_bytes
    assert low == least("auto")                     # as nothing here has uncounted temporary memory
    assert f"of its own peak of {prepare(traced('analytic')).baseline_peak:,} bytes" in str(error.value)
    assert make_plan(traced(), Budget(bytes=low), "rockmate").plan.peak_bytes <= low
    assert nothing_is_measured
    bound = min(_bound(block(traced(), variant)) for variant in (PLAIN, CHUNKED_LOSS))
    assert f"at least {bound:,} bytes" in str(error.value) and bound <= low
    with pytest.raises(rkmate.InfeasibleBudget, match="always meets"):
        make_plan(traced(), Budget(bytes=bound), "rockmate")


def test_a_fraction_is_one_of_the_largest_peak_that_may_be_measured(nothing_is_measured: list[Any]) -> None:
    with pytest.raises(rkmate.InfeasibleBudget, match="Nothing was measured"):
        make_plan(traced(), Budget(fraction=0.01), "rockmate")
    blocks = {v.variant: v for v in [block(traced())]}
    refuse_unmeasured(blocks, Budget(fraction=0.9), METHOD)
    assert not nothing_is_measured


def test_short_steps_are_measured(nothing_is_measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the error says what was measured."""
    monkeypatch.setattr(unmeasured, "LONG", 1e9)
    with pytest.raises(rkmate.InfeasibleBudget, match="always meets") as error:
        make_plan(traced(), Budget(bytes=1000), "rockmate")
    assert nothing_is_measured and error.value.minimum_bytes == least("auto")


def test_a_variant_that_comes_no_further_down_is_not_measured(
        nothing_is_measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are refused as they are. The first one's costs are known; what the other's bound says of it is
    enough."""
    monkeypatch.setattr(smallest, "bytes_of_any", lambda p: p.blocked.variant is CHUNKED_LOSS and 10**12)
    with pytest.raises(rkmate.InfeasibleBudget):
        plan_prepared(prepare(traced()), 1000)
    assert len({id(parts) for parts in nothing_is_measured}) == 1


@pytest.mark.parametrize("name", [
    "lstm", "tied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "resnet", "t5", "unet"))])
def test_what_is_refused_as_it_is_has_no_schedule(name: str) -> None:
    """The bound is below what the slow way names, and what that names is not refused."""
    sample = BANK[name](seed=0)
    settings = Settings(costs="analytic", options=OPTIONS, planner=PLANNER)
    counted = trace(sample.model, sample.args, sample.kwargs, settings, Progress(False))
    here = replace(counted, settings=replace(settings, costs="measured"))
    for variant in (None, *others(settings, block(counted).concerned)):
        slow, fast = prepare(counted, variant), block(here, variant)
        bound = _bound(fast)
        assert refused_as_it_is(fast, METHOD, bound - 1) is not None
        assert refused_as_it_is(fast, METHOD, bound) is None
        assert bound <= bytes_of_any(slow) <= slow.baseline_peak
        smallest = METHOD.smallest(unmeasured.lean_problem(slow), 1).peak
        assert bound <= smallest


def _bound(blocked: Blocked) -> int:
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if refused_as_it_is(blocked, METHOD, middle) is not None else (low, middle)
    return high


def test_who_is_not_refused_so() -> None:
    """Counted costs are there at once, other planners may have other schedules, and a small graph is searched
    in no time."""
    blocked = block(traced())
    assert refused_as_it_is(blocked, METHOD, 1) is not None
    assert refused_as_it_is(block(traced("analytic")), METHOD, 1) is None
    assert refused_as_it_is(blocked, planner("chen", PLANNER), 1) is None
    shallow = replace(traced().settings, planner=replace(PLANNER, deep_nodes=10**6))
    assert refused_as_it_is(block(replace(traced(), settings=shallow)), METHOD, 1) is None
