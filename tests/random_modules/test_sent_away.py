"""Random modules, random values sent away at random times: equal gradients, and the simulator's peak."""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import rkmate
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Free, Leave, Schedule, Step
from tests.capturing import captured_once
from tests.clocks import count_times
from tests.copying import LateEngine, sending, use
from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample
from tests.planners.send_all import Gap, gaps, inserted
from tests.random_modules.programs import Program, Recipe, recipes
from tests.random_modules.test_random_modules import QUICK, _loss

_examples = itertools.count()
SCALARS = 512
"""Bytes that the simulator leaves for the loss and its gradient."""


class WithLoss(nn.Module):
    """The loss inside: nobody else allocates in a step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.program = Program(recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _loss(self.program(x))


def at_random(chance: random.Random, graph: CDGraph, schedule: Schedule) -> Schedule:
    """Some D nodes go in some of their gaps, at any of the times at which they may."""
    steps = schedule.steps
    more: list[tuple[int, Step]] = []
    before: dict[int, list[Gap]] = {}
    sent: set[int] = set()
    for gap in gaps(graph, schedule):
        earlier = before.setdefault(gap.d, [])
        earlier.append(gap)
        if chance.random() < 0.4:
            continue
        if gap.d in sent:
            at = chance.randint(gap.after, gap.before)
            more += [(gap.after, Free(gap.d)), (at, CopyIn(gap.d))]
            continue
        begun = chance.choice([g for g in earlier if _stays(graph, steps[g.after:gap.before], gap.d)])
        out = chance.randint(begun.after, begun.before if begun is not gap else gap.before)
        leave = chance.randint(max(out, gap.after), gap.before)
        more += [(out, CopyOut(gap.d)), (leave, Leave(gap.d)),
                 (chance.randint(leave, gap.before), CopyIn(gap.d))]
        sent.add(gap.d)
    return inserted(schedule, more)


def _stays(graph: CDGraph, steps: tuple[Step, ...], d: int) -> bool:
    """Whether a D node is neither freed nor made anew."""
    return not any((isinstance(s, Free) and s.d == d)
                   or (isinstance(s, Compute) and d in graph.c[s.c].outputs)
                   for s in steps)


def without_draws(recipe: Recipe) -> Recipe:
    """The same with other operations in the place of those that draw random numbers."""
    instead = {"noise": "norm", "dropout": "other linear"}
    return replace(recipe, steps=tuple(replace(s, operation=instead.get(s.operation, s.operation))
                                       for s in recipe.steps))


def check(recipe: Recipe, share: float, number: int, monkeypatch: pytest.MonkeyPatch, *, exact: bool) -> None:
    """Beside the plan that keeps what this one sends. `exact`: nothing is drawn; of what draws, the simulator
    knows the most that it may take."""
    engine = use(monkeypatch, LateEngine())
    model, x = WithLoss(recipe), torch.randn(4, 6, 8)
    twin = copy.deepcopy(model)
    with captured_once(f"sent away {next(_examples)}"), tempfile.TemporaryDirectory() as folder:
        try:
            plain = rkmate.plan(model, (x,), budget=share, progress=False, settings=QUICK)
        except rkmate.InfeasibleBudget as error:
            plain = rkmate.plan(model, (x,), budget=error.minimum_bytes, progress=False, settings=QUICK)
        chance = random.Random(number)
        sent = sending(plain, lambda *of: at_random(chance, *of))
        module = rkmate.wrap(model, (x,), plan=sent, progress=False, settings=QUICK, offload=folder)
        kept = rkmate.wrap(twin, (x,), plan=plain, progress=False, settings=QUICK)
    sample = Sample(model, (x,), {}, lambda output: output)
    assert_same_step(kept, module, sample)
    measured, predicted = measured_peak(module, sample), module.plan.peak_bytes
    assert measured <= predicted
    assert measured >= predicted - SCALARS or not exact
    assert engine.opened == engine.closed


def examples(count: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))
    @given(recipes, st.floats(0.2, 1), st.integers(0, 2**30), st.booleans())
    def run(recipe: Recipe, share: float, chance: int, exact: bool) -> None:
        check(without_draws(recipe) if exact else recipe, share, chance, monkeypatch, exact=exact)

    run()


def test_two(monkeypatch: pytest.MonkeyPatch) -> None:
    count_times(monkeypatch)
    examples(2, 0, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_five_hundred(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    examples(50, 100 + part, monkeypatch)
