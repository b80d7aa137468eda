"""Which variant of a graph is planned at which budget: on a small model with a wide head, costs counted."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from rkmate.budget import Budget
from rkmate.device import cpu
from rkmate.ilp.settings import OptionSettings
from rkmate.ir.cd import Kernel
from rkmate.pipeline import attempts, variants
from rkmate.pipeline import search as planning
from rkmate.pipeline.following import follow, follow_any
from rkmate.pipeline.prepare import Traced, block, prepare, trace
from rkmate.pipeline.refuse import seconds_of_any
from rkmate.pipeline.search import make_curve, make_plan, smallest_peak_of
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.sizes import bounded_costs
from rkmate.pipeline.solve import solve
from rkmate.pipeline.variants import (
    CHUNKED_LOSS,
    FASTER_BY,
    PLAIN,
    Variant,
    named,
    others,
    seconds_once,
    together,
)
from rkmate.planners.settings import PlannerSettings
from rkmate.support.progress import Progress

OPTIONS = OptionSettings(grid=(3, 3), time_limit=0.2, block_limit=1.0)
PLANNER = PlannerSettings(first_seconds=0, save_set_seconds=1e4, smallest_seconds=0)
"""Nothing depends on a clock."""
WORDS = 4096


class _Model(nn.Module):
    """Layers before a head whose logits are as large as what a few of the layers keep."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
                                    for _ in range(layers))
        self.head = nn.Linear(64, WORDS, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), labels)


@functools.cache
def traced(when: Any = "auto") -> Traced:
    torch.manual_seed(0)
    settings = Settings(costs="analytic", options=OPTIONS, chunked_loss=when, planner=PLANNER)
    inputs = torch.randn(512, 64), torch.randint(0, WORDS, (512,))
    return trace(_Model(), inputs, {}, settings, Progress(False))


@functools.cache
def own_peak() -> int:
    return prepare(traced()).baseline_peak


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@functools.cache
def least(when: str) -> int:
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        make_plan(traced(when), Budget(bytes=1), "rockmate")
    return error.value.minimum_bytes


def middle() -> int:
    """A budget that the plain graph meets by computing much again."""
    return int(1.15 * least("never"))


def test_where_the_step_fits_whole_nothing_is_traded(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(planning, "prepare", lambda *a, **k: prepared.append(a) or prepare(*a, **k))
    plan = make_plan(traced(), Budget(fraction=1.0), "rockmate").plan
    assert plan.variant == "plain" and not plan.schedule.recomputed() and not heard
    assert len(prepared) == 1                        # no variant, no work


def test_the_fastest_is_taken_and_says_why(heard: Any) -> None:
    limit = middle()
    plain = make_plan(traced("never"), Budget(bytes=limit), "rockmate").plan
    always = make_plan(traced("always"), Budget(bytes=limit), "rockmate").plan
    assert not heard
    assert always.step_seconds < plain.step_seconds * (1 - FASTER_BY)
    found = make_plan(traced(), Budget(bytes=limit), "rockmate")
    assert found.plan.variant == "chunked-loss" == found.prepared.blocked.variant.name
    assert found.plan.step_seconds == pytest.approx(always.step_seconds, rel=5e-3)
    assert found.plan.peak_bytes <= limit and found.plan.stage_seconds["other variants"] > 0
    assert "faster than the fastest schedule of the original's operations" in found.plan.note
    (warning,) = heard
    assert "faster than the fastest schedule of the original's operations within this budget" \
        in str(warning.message)
    assert 'rkmate.Settings(chunked_loss="never") keeps its bits' in str(warning.message)


def test_a_little_faster_is_not_enough(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "FASTER_BY", 0.9)
    plan = make_plan(traced(), Budget(bytes=middle()), "rockmate").plan
    assert plan.variant == "plain" and not heard


def test_a_longer_search_has_to_reach_what_the_variant_is_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that trades something is searched longer only where its bound allows the gain by which it
    would be taken, instead of the plain graph's plan."""
    monkeypatch.setattr(variants, "FASTER_BY", 0.05)
    monkeypatch.setattr(planning, "FASTER_BY", 0.05)
    asked: list[float] = []

    def of(seconds: float, bound: float, variant: Variant) -> Any:
        plan = SimpleNamespace(step_seconds=seconds, bound_seconds=bound)
        found = attempts.Found(SimpleNamespace(plan=plan, prepared=SimpleNamespace(  # type: ignore[arg-type]
            blocked=SimpleNamespace(variant=variant, traced=SimpleNamespace(is_late=False)))), few=object())
        return found

    def longer(found: Any, *_: Any) -> Any:
        asked.append(found.plan.step_seconds)
        return found

    monkeypatch.setattr(planning, "with_more_options", longer)
    monkeypatch.setattr(planning, "in_larger_tiles", lambda found, *_: found)
    plain = of(1.0, 0.999, PLAIN)
    for seconds, bound, searched in ((0.97, 0.945, False), (0.97, 0.93, True), (0.94, 0.935, False),
                                     (0.94, 0.92, True)):
        found = of(seconds, bound, CHUNKED_LOSS)
        taken = found if seconds < 0.95 else plain
        asked.clear()
        planning._searched_longer([found], taken, plain, None, 1, {PLAIN: 0.0, CHUNKED_LOSS: 0.0})
        assert asked == [seconds] * searched


def test_what_can_gain_nothing_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just below the peak of the plain step, what is computed again is less than a percent of it."""
    prepared: list[Any] = []
    monkeypatch.setattr(planning, "prepare", lambda *a, **k: prepared.append(a) or prepare(*a, **k))
    plan = make_plan(traced(), Budget(bytes=own_peak() - 1), "rockmate").plan
    assert plan.overhead < FASTER_BY and plan.variant == "plain" and len(prepared) == 1


def test_what_is_slower_by_its_bound_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that computes as much again as the plain graph does is prepared, and no more."""
    low, between, solved = least("always"), middle(), list[Any]()
    here = prepare(traced(), CHUNKED_LOSS)
    always = make_plan(traced("always"), Budget(bytes=low), "rockmate").plan
    assert seconds_once(here.graph) < seconds_of_any(here, low) <= always.step_seconds
    monkeypatch.setattr(planning, "seconds_of_any", lambda *_: 1.0)
    monkeypatch.setattr(attempts, "solve_lean", lambda p: solved.append(p) or solve(p))
    plan = make_plan(traced(), Budget(bytes=between), "rockmate").plan
    assert plan.variant == "plain" and len(solved) == 1


def test_budgets_that_nothing_else_meets(heard: Any) -> None:
    assert least("auto") == least("always") < least("never")
    plan = make_plan(traced(), Budget(bytes=least("auto")), "rockmate").plan
    assert plan.variant == "chunked-loss" and plan.peak_bytes <= least("auto")
    plain = prepare(traced())
    assert plan.baseline_peak_bytes == own_peak() and plan.baseline_seconds == plain.baseline.seconds
    (warning,) = heard
    assert "nothing fits in this budget" in str(warning.message)
    assert "refuses such budgets" in str(warning.message)
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        make_plan(traced(), Budget(bytes=1000), "rockmate")
    assert error.value.minimum_bytes == least("auto")
    assert f"of its own peak of {own_peak():,} bytes" in str(error.value)
    assert smallest_peak_of(prepare(traced()), 1) == least("auto")


@pytest.mark.slow
def test_a_curve_compares_at_each_budget(heard: Any) -> None:
    limits = [own_peak(), middle(), least("auto")]
    curve = make_curve(traced(), [Budget(bytes=n) for n in limits], "rockmate")
    assert [p.variant for p in curve] == ["plain", "chunked-loss", "chunked-loss"]
    assert [p.budget_bytes for p in curve] == limits and len(heard) == 1
    assert all(p.peak_bytes <= p.budget_bytes for p in curve)
    assert curve[0].step_seconds <= curve[1].step_seconds <= curve[2].step_seconds
    own = make_curve(traced(), None, "rockmate")
    assert own[0].variant == "plain" and own[-1].budget_bytes == least("auto")


def test_plans_are_followed_on_their_variant() -> None:
    plan = make_plan(traced(), Budget(bytes=least("auto")), "rockmate").plan
    assert follow(traced(), plan).prepared.blocked.variant is CHUNKED_LOSS
    found = follow_any(traced(), [plan])
    assert found is not None and found.plan is plan


def test_the_chunked_loss_has_kernels_of_fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PART_BYTES", 2**17)
    graph = prepare(traced(), CHUNKED_LOSS).graph
    (node,) = (c for c in graph.c if c.alternatives)
    kernels = [Kernel(node.time, node.overhead), *node.alternatives]
    assert len(kernels) == 3                         # 16 parts, 4, 2
    for lean, fast in itertools.pairwise(kernels):
        assert fast.time < lean.time and fast.overhead > lean.overhead


def test_a_budget_that_is_clearly_too_small_solves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest budget of a deep graph is named without the options of its blocks, and is met."""
    deep = Settings(costs="analytic", options=OPTIONS, planner=PlannerSettings(deep_nodes=10))
    torch.manual_seed(0)
    inputs = torch.randn(512, 64), torch.randint(0, WORDS, (512,))
    here = trace(_Model(2), inputs, {}, deep, Progress(False))
    with monkeypatch.context() as patched:
        patched.setattr(attempts, "solve_lean", lambda _: pytest.fail("options were solved"))
        with pytest.raises(rkmate.InfeasibleBudget) as error:
            make_plan(here, Budget(bytes=1000), "rockmate")
    low = error.value.minimum_bytes
    assert make_plan(here, Budget(bytes=low), "rockmate").plan.peak_bytes <= low


def test_passes_note_what_each_variant_concerns() -> None:
    concerned = block(traced()).concerned
    assert {*concerned, "uncompiled"} == {v.name for v in variants.VARIANTS if v.setting}
    assert concerned["chunked-loss"] == ("head.weight",)


def test_variants_that_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = Variant("tiles", trades="bits", setting="chunked_loss", note="tiles of {names}",
                    combines=("chunked-loss",))
    apart = Variant("apart", setting="chunked_loss")
    monkeypatch.setattr(variants, "VARIANTS", (PLAIN, CHUNKED_LOSS, tiles, apart))
    both = together((CHUNKED_LOSS, tiles))
    assert both.name == "chunked-loss+tiles" and both.rows == (CHUNKED_LOSS, tiles)
    concerned = {"chunked-loss": ("head",), "tiles": ("a", "b"), "apart": ("c",)}
    assert others(Settings(), concerned) == (CHUNKED_LOSS, tiles, apart, both)
    assert others(Settings(), {"tiles": ("a",)}) == (tiles,)
    assert named("chunked-loss+tiles") == both and named("chunked-loss+unknown") is PLAIN
    assert both.notes(concerned).endswith("at a time; tiles of a, b")
    assert both.when(Settings(chunked_loss="never")) == "never"


def test_kernels_at_another_size_are_bounded_by_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PART_BYTES", 2**17)
    prepared = prepare(traced(), CHUNKED_LOSS)
    program = prepared.partition.program
    known = [prepared.costs[i] for i in range(len(prepared.graph.c))]
    assert bounded_costs(known, program) == known
    (k,) = (i for i, c in enumerate(prepared.graph.c) if c.alternatives)
    less = [c._replace(overhead=1, alternatives=tuple(o._replace(overhead=1) for o in c.alternatives))
            for c in known]
    assert bounded_costs(less, program)[k] == known[k]
    fewer = [c._replace(alternatives=c.alternatives[:1]) for c in known]
    assert bounded_costs(fewer, program)[k].alternatives == ()
