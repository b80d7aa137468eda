"""Every planner on random captured models: executable, within the budget, never better than the
optimum, never slower with more memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import rkmate
from rkmate.errors import ArgumentError
from rkmate.ir.schedule import save_all
from rkmate.ir.simulate import simulate
from rkmate.planners.protocol import Candidate, Outcome, Problem, ask, found_in
from rkmate.planners.registry import PLANNERS, planner
from tests.planners.problems import problems, stack

GIVEN = ("rockmate", "auto", "save-set")
"""Planners that more memory may make slower, unless they know what they found for less."""
FRACTIONS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3)


def check(problem: Problem, outcome: Outcome, budget: int) -> None:
    if outcome.schedule is None:
        assert outcome.status != "ok" and outcome.seconds == math.inf
        return
    result = simulate(problem.graph, outcome.schedule)
    assert outcome.status == "ok"
    assert result.peak <= budget
    assert result.seconds == pytest.approx(outcome.seconds)
    if outcome.bound is not None:
        assert outcome.bound <= outcome.seconds * (1 + 1e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_all_planners_on_random_models(problem: Problem) -> None:
    graph = problem.graph
    top = simulate(graph, save_all(graph)).peak
    before = dict.fromkeys(PLANNERS, math.inf)
    known: dict[str, list[Candidate]] = {name: [] for name in GIVEN}
    for fraction in reversed(FRACTIONS):
        budget = math.ceil(top * fraction)
        outcomes = {name: ask(p, problem, budget, time_limit=20.0, known=known.get(name))
                    for name, p in PLANNERS.items()}
        for name in GIVEN:
            known[name] += found_in(problem, outcomes[name])
        optimum = outcomes["checkmate"]
        assert optimum.status != "timeout"
        bound = outcomes["save-set"].bound
        assert bound is not None
        assert bound <= optimum.seconds * (1 + 1e-6)
        for name, outcome in outcomes.items():
            check(problem, outcome, budget)
            assert outcome.seconds >= optimum.seconds - 1e-6, name
            assert outcome.seconds <= before[name] + 1e-6, name
            before[name] = outcome.seconds


@pytest.mark.parametrize("name", PLANNERS)
def test_residual_stack(name: str) -> None:
    problem = stack({"checkmate": 2, "auto": 2, "save-set": 3}.get(name, 5))
    top = simulate(problem.graph, save_all(problem.graph)).peak
    before = math.inf
    known: list[Candidate] = []
    tightest: Outcome | None = None
    for fraction in reversed(FRACTIONS):
        budget = math.ceil(top * 1.1 * fraction)
        outcome = ask(PLANNERS[name], problem, budget, time_limit=30.0,
                      known=known if name in GIVEN else None)
        known += found_in(problem, outcome)
        check(problem, outcome, budget)
        assert outcome.seconds <= before + 1e-6
        before = outcome.seconds
        if tightest is None and outcome.schedule is not None:
            tightest = outcome
    assert tightest is not None and tightest.schedule is not None
    assert bool(tightest.schedule.recomputed()) == (name != "save-all")


def test_unknown_planner() -> None:
    with pytest.raises(ArgumentError, match="rockmate, rk-rotor, rotor"):
        planner("best")
    assert planner("rotor").name == "rotor"


def test_registry_names_its_planners() -> None:
    assert [p.name for p in PLANNERS.values()] == list(PLANNERS)


@pytest.mark.slow
def test_auto_says_what_it_took() -> None:
    problem = stack(3)
    top = simulate(problem.graph, save_all(problem.graph)).peak
    roomy = planner("auto").plan(problem, 2 * top)
    assert roomy.note.startswith("save-all: 1.000")
    tight = planner("auto").plan(problem, int(top * 0.7), time_limit=20)
    assert tight.schedule is not None and "against" in tight.note
    none = planner("auto").plan(problem, 1, time_limit=5)
    assert none.status == "infeasible" and "none of" in none.note


def test_a_budget_that_a_refusal_would_name_is_met_at_once() -> None:
    """Rotor counts bytes in steps: its search finds nothing at the model's own peak, which it can meet."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    counted = rkmate.Settings(costs="analytic", loss_bytes=0, planner="rotor", tiles="never")
    plan = rkmate.plan(model, (torch.randn(128, 64),), budget=1.0, settings=counted, progress=False)
    assert plan.peak_bytes == plan.budget_bytes
