"""The plan that `wrap` takes unless told otherwise: never slower with more memory, nor than others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import rkmate
from rkmate.budget import Budget
from rkmate.errors import ArgumentError
from rkmate.pipeline import attempts
from rkmate.pipeline import search as planning
from rkmate.pipeline.attempts import attempted
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.search import make_curve, plan_prepared
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.solve import Solved
from rkmate.planners import default
from rkmate.planners.chain import SAVE_ALL, ChainSearch, smallest_of_chain
from rkmate.planners.default import Auto, Default
from rkmate.planners.protocol import Candidate, Outcome, Problem, ask, found_in, infeasible, whole_step
from rkmate.planners.registry import PLANNERS, planner
from rkmate.planners.settings import PlannerSettings
from rkmate.support.progress import Progress
from tests.comparison.models import residual
from tests.models import BANK
from tests.planners.prepared import QUICK, solved_of
from tests.planners.problems import stack
from tests.random_modules.programs import Program, Recipe, recipes

OTHERS = ("save-set", "dtr", "lower-sets", "rotor")
AMPLE = 60.0
"""Seconds for programs that end by themselves: no result here depends on the machine."""
NEAR = PlannerSettings().gap_tolerance


def check(solved: Solved, levels: int) -> None:
    """Budgets from the largest to the smallest: monotone, and nobody beside is faster."""
    problem = solved.problem
    low, high = smallest_of_chain(problem).peak, whole_step(problem).peak
    budgets = [low + (high - low) * k // levels for k in range(levels, -1, -1)]
    patient = replace(solved.prepared.settings, planner=PlannerSettings(save_set_seconds=AMPLE,
                                                                        first_seconds=0.2))
    traced = replace(solved.prepared.blocked.traced, settings=patient)
    plans = make_curve(traced, [Budget(bytes=b) for b in budgets], "rockmate")
    times = [p.step_seconds for p in plans]
    assert times == sorted(times)
    for budget, own in zip(budgets, plans, strict=True):
        assert own.peak_bytes <= budget
        for name in OTHERS:
            other = planner(name).plan(problem, budget, time_limit=AMPLE)
            assert own.step_seconds <= other.seconds * (1 + NEAR), (name, budget)


@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.too_slow])
@given(recipes)
def test_random_models(recipe: Recipe) -> None:
    check(solved_of(Program(recipe), (torch.randn(4, 6, 8),)), 4)


def test_a_residual_model() -> None:
    sample = residual()
    check(solved_of(sample.model, sample.args), 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet", "transformer_encoder"])
def test_models_of_the_bank(name: str) -> None:
    sample = BANK[name]()
    check(solved_of(sample.model, sample.args, sample.kwargs, Settings(costs="analytic")), 4)


class Asked:
    """A planner that finds nothing and remembers how long it might have looked."""

    name = "asked"

    def __init__(self) -> None:
        self.limits: list[float | None] = []

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        self.limits.append(time_limit)
        return infeasible("nothing")


def ends(problem: Problem) -> tuple[int, int]:
    return smallest_of_chain(problem).peak, whole_step(problem).peak


def test_auto_shares_its_time_with_the_default() -> None:
    problem, asked, kept = stack(5), Asked(), Asked()
    quick = PlannerSettings(save_set_seconds=0.6)           # more than it is given
    auto = Auto(Default(quick, kept), (SAVE_ALL,), (asked,))
    found = auto.plan(problem, sum(ends(problem)) // 2, time_limit=0.25)
    assert found.schedule is not None and found.note.startswith("rockmate: ")
    limit, = kept.limits
    assert limit is not None and 0 <= limit <= 0.25
    assert all(limit is not None and 0 <= limit < 0.25 for limit in asked.limits)


def test_the_first_budget_is_looked_at_for_longer() -> None:
    problem, kept = stack(5), Asked()

    class Bounding(Asked):
        def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
            return replace(super().plan(problem, budget, time_limit=time_limit), bound=0.0, cut_short=True)

    kept = Bounding()
    own = Default(PlannerSettings(save_set_seconds=0.0, first_seconds=0.2), kept)   # cut short at once
    low, high = ends(problem)
    own.plan(problem, high)
    assert kept.limits == []
    own.plan(problem, (low + high) // 2)
    own.plan(problem, low, known=())
    assert kept.limits == [0.0, 0.2, 0.0]


def test_further_budgets_of_deep_graphs() -> None:
    """The chain comes first, and the save-set program gets less time than for others."""
    problem, kept = stack(6), Asked()
    low, high = ends(problem)
    deep = PlannerSettings(deep_nodes=0, deep_seconds=0.1)
    own = Default(deep, kept)
    for k in (1, 3, 5):
        budget = low + (high - low) * k // 6
        kept.limits.clear()
        alone = own.plan(problem, budget, known=())
        assert kept.limits == [0.1]
        assert alone.schedule is not None and problem.simulate(alone.schedule).peak <= budget
        chain = ChainSearch(deep, tries=5, count=1, quick=True).plan(problem, budget)
        assert alone.seconds <= chain.seconds
        assert alone.seconds < smallest_of_chain(problem).seconds or k == 1


def test_what_is_known_serves_larger_budgets() -> None:
    problem = stack(6)
    low, high = ends(problem)
    known: list[Candidate] = []
    before = float("inf")
    for k in range(7):
        found = ask(Default(), problem, low + (high - low) * k // 6, known=known or None)
        assert found.seconds <= before
        before = found.seconds
        known += found_in(problem, found)


@pytest.mark.parametrize(("layers", "whole_graph"), [(1, "save-set"), (4, "lower-sets")])
def test_a_budget_asked_before_changes_nothing(layers: int, whole_graph: str) -> None:
    """The same problem and budget: the same schedule, whatever was asked before."""
    patient = Default(PlannerSettings(save_set_seconds=AMPLE, first_seconds=AMPLE, smallest_seconds=AMPLE),
                      PLANNERS[whole_graph])
    fresh, used = stack(layers), stack(layers)
    low, high = ends(fresh)
    middle = (low + high) // 2
    for k in (1, 3, 5, 0):
        patient.plan(used, low - 1 + (high - low) * k // 6)
    assert patient.plan(used, middle).schedule == patient.plan(fresh, middle).schedule
    assert patient.smallest(used, 1).peak == patient.smallest(fresh, 1).peak


def test_below_what_the_chain_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = residual()
    problem = solved_of(sample.model, sample.args).problem
    whole = whole_step(problem)
    middle = sum(ends(problem)) // 2
    monkeypatch.setattr(default, "smallest_of_chain", lambda _: replace(whole, peak=whole.peak - 1))
    found = Default(PlannerSettings(first_seconds=AMPLE)).plan(problem, middle)
    assert found.schedule is not None
    assert found.smallest == problem.simulate(found.schedule).peak <= middle
    assert "save-set" in found.note


def test_auto_without_time_is_the_default() -> None:
    problem = stack(4)
    found = planner("auto").plan(problem, sum(ends(problem)) // 2, time_limit=1e-9)
    assert found.schedule is not None and found.note.startswith("rockmate: ")
    assert "no time for save-all" in found.note


@pytest.mark.parametrize("name", ["rockmate", "auto"])
def test_a_budget_that_is_too_small(name: str) -> None:
    sample = residual()
    solved = solved_of(sample.model, sample.args, how=replace(QUICK, planning_seconds=1.0))
    with pytest.raises(rkmate.InfeasibleBudget, match="smallest budget that rockmate always meets") as error:
        plan_prepared(solved.prepared, 1, name)
    least = error.value.minimum_bytes
    assert least <= smallest_of_chain(solved.problem).peak
    assert plan_prepared(solved.prepared, least, name).planner == name


@pytest.mark.slow
def test_the_smallest_budget_counts_what_the_whole_graphs_program_reaches() -> None:
    """Asked for it, and for a little more, the planner finds a schedule; for less it names it again."""
    patient = PlannerSettings(first_seconds=AMPLE, smallest_seconds=AMPLE)
    sample = residual()
    prepared = solved_of(sample.model, sample.args, how=replace(QUICK, planner=patient)).prepared
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        plan_prepared(prepared, 1)
    least = error.value.minimum_bytes
    assert least < smallest_of_chain(solved_of(sample.model, sample.args).problem).peak
    for more in (0, 100):
        assert plan_prepared(prepared, least + more).peak_bytes <= least + more
    for less in (1, 500):
        with pytest.raises(rkmate.InfeasibleBudget, match=f"{least:,} bytes"):
            plan_prepared(prepared, least - less)


class Slow:
    """A planner that finds half of what it is asked for, and spends all the time that it is given."""

    name = "slow"

    def __init__(self, meets: int) -> None:
        self.meets, self.given = meets, [0.0]

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        assert time_limit is not None
        self.given.append(time_limit)
        whole = whole_step(problem)
        return Outcome(whole.schedule, "ok", 1.0) if budget >= self.meets else infeasible("no")


def test_to_word_an_error_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own, which only the planner moves on."""
    from types import SimpleNamespace

    from rkmate.planners import protocol

    problem = stack(3)
    slow = Slow(whole_step(problem).peak)
    monkeypatch.setattr(protocol, "time", SimpleNamespace(perf_counter=lambda: sum(slow.given)))
    assert protocol.smallest(slow, problem, 10).peak == whole_step(problem).peak
    assert len(slow.given) > 3 and sum(slow.given) <= protocol.SMALLEST_SECONDS
    assert protocol.smallest(Slow(10**9), problem, 10) is None


def test_ample_budgets_solve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = residual()
    traced = trace(sample.model, sample.args, {}, QUICK, Progress(False))

    def never(*_: Any) -> None:
        raise AssertionError("options were solved")

    monkeypatch.setattr(attempts, "solve_lean", never)
    for name in ("rockmate", "auto"):
        assert planning.make_plan(traced, Budget(fraction=1.0), name).plan.overhead == 0
        assert [p.overhead for p in make_curve(traced, [Budget(fraction=1.0)], name)] == [0]
    with pytest.raises(AssertionError, match="were solved"):
        planning.make_plan(traced, Budget(fraction=0.9), "rockmate")


def test_plans_carry_options_and_runs() -> None:
    sample = residual()
    solved = solved_of(sample.model, sample.args)
    low, high = ends(solved.problem)
    found = attempted(solved.prepared, solved, planner("rockmate"), (low + high) // 2).plan
    assert found is not None and all(b.options for b in found.blocks)
    assert {r.block for r in found.runs} == set(range(len(found.blocks)))
    assert found.variant == "plain" and found.minimum_bytes == low


def test_settings_are_checked() -> None:
    with pytest.raises(ArgumentError, match="gap_tolerance is -1"):
        PlannerSettings(gap_tolerance=-1)
    with pytest.raises(ArgumentError, match="slots"):
        PlannerSettings(slots=0)
    with pytest.raises(ArgumentError, match="deep_nodes is"):
        PlannerSettings(deep_nodes=0.5)  # type: ignore[arg-type]


def test_the_default_is_one_of_the_registry() -> None:
    own = PLANNERS["rockmate"]
    assert isinstance(own, Default) and own.asks == ("rk-rotor", "save-set", "sequential")
    patient = PlannerSettings(first_seconds=7.0)
    assert planner("rockmate", patient) == Default(patient)
    with pytest.warns(rkmate.RkmateWarning, match="now called 'save-set'"):
        assert planner("keep-set").name == "save-set"
