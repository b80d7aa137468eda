"""Several calls before one backward: the budget of all of them, and a warning where it is that of one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rkmate
from tests.capturing import captured_once
from tests.semantics.steps import assert_same_gradients, planned

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
INPUTS = [X * k for k in (1, 2, 3)]


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))))


@functools.cache
def of_one_call() -> rkmate.Plan:
    return rkmate.plan(tower(), (X,), budget=0.6, settings=rkmate.Settings(costs="analytic"), progress=False)


@functools.cache
def of_calls(calls: int, budget: float) -> rkmate.Plan:
    return rkmate.plan(tower(), (X,), budget=budget, settings=rkmate.Settings(costs="measured"),
                       progress=False, calls=calls)


def one_call() -> tuple[nn.Sequential, rkmate.PlannedModule]:
    model = tower()
    return model, rkmate.wrap(model, (X,), plan=of_one_call())


def siamese(run: Callable[..., torch.Tensor], calls: int = 2) -> torch.Tensor:
    found = [run(x) for x in INPUTS[:calls]]
    return sum(k * y.mean() for k, y in enumerate(found, 1))  # type: ignore[return-value]


@pytest.mark.parametrize(("calls", "budget"), [
    (2, 1.0), pytest.param(2, 0.5, marks=pytest.mark.slow), (3, 0.4)])
def test_the_budget_holds_for_the_step_of_all_calls(calls: int, budget: float) -> None:
    model, plan = tower(), of_calls(calls, budget)
    module = rkmate.wrap(model, (X,), plan=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_gradients(model, module, lambda run: siamese(run, calls))
        together = rkmate.measure_step(module, lambda: siamese(module, calls).backward()).peak
        plain = rkmate.measure_step(model, lambda: siamese(model, calls).backward()).peak
    assert plan.calls == calls
    assert together <= plan.peak_bytes <= plan.budget_bytes
    # A fraction is one of the peak of as many calls of the original.
    assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.1)
    assert plan.budget_bytes == int(budget * plan.baseline_peak_bytes)


def test_backwards_one_by_one_in_any_order() -> None:
    plan = of_calls(2, 0.5)
    module = rkmate.wrap(tower(), (X,), plan=plan)

    def step() -> None:
        first, second = module(X).mean(), module(INPUTS[1]).mean()
        first.backward()
        second.backward()

    assert rkmate.measure_step(module, step).peak <= plan.budget_bytes


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    model = tower()
    with captured_once():
        with pytest.raises(rkmate.InfeasibleBudget) as caught:
            planned(model, X, budget=1000, calls=2)
        least = caught.value.minimum_bytes
        assert planned(model, X, budget=least, calls=2).plan.peak_bytes <= least


def test_a_plan_says_how_many_calls_it_is_for(tmp_path: Path) -> None:
    plan = of_calls(2, 0.5)
    plan.save(tmp_path / "plan.json")
    assert rkmate.Plan.load(tmp_path / "plan.json") == plan
    assert "2 calls" in plan.explain()
    assert "2 calls" in str(plan)
    assert "calls" not in str(of_one_call())


@pytest.mark.parametrize("calls", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_calls(calls: object) -> None:
    with pytest.raises(rkmate.ArgumentError, match="calls is"):
        planned(tower(), X, calls=calls)


def test_a_plan_of_fewer_calls_is_not_followed() -> None:
    with pytest.raises(rkmate.PlanError, match=r"made with calls=1.*calls=2: make another"):
        rkmate.wrap(tower(), (X,), plan=of_one_call(), calls=2)


# -- without being planned for ------------------------------------------------------------


def test_unplanned_calls_are_said_once_with_both_figures() -> None:
    _, module = one_call()
    budget = module.plan.budget_bytes

    def steps() -> None:
        for calls in (2, 2, 3, 3):
            siamese(module, calls).backward()

    with pytest.warns(rkmate.RkmateWarning) as caught:
        steps()
    told = [str(w.message) for w in caught]
    assert [text.split(" of this module")[0] for text in told] == ["2 calls", "3 calls"]
    assert all(f"budget of {budget:,}" in text for text in told)
    assert "calls=2" in told[0]
    assert "calls=3" in told[1]
    figure = int(told[0].split("about ")[1].split(" bytes")[0].replace(",", ""))

    def step() -> None:
        """A step whose outputs the training loop names, as plans count them."""
        first, second = map(module, INPUTS[:2])
        (first.mean() + 2 * second.mean()).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = rkmate.measure_step(module, step).peak
    assert budget < measured <= figure <= 1.1 * measured


@pytest.mark.parametrize(("opened", "told"), [(1, "at most 1 were"), (2, "")])
def test_fewer_calls_than_planned_are_said_once(opened: int, told: str,
                                                caplog: pytest.LogCaptureFixture) -> None:
    module = rkmate.wrap(tower(), (X,), plan=of_calls(2, 0.5))
    for _ in range(6 // opened):
        siamese(module, opened).backward()
    words = [r.getMessage() for r in caplog.records if "2 calls of a module" in r.getMessage()]
    assert len(words) == bool(told)
    assert all(told in text and "calls=1)" in text for text in words)


def test_what_is_no_second_call() -> None:
    _, module = one_call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            loss = module(X).mean()
            loss.backward()                  # the loss stays, what it was computed from does not
        module(X)                            # dropped, without a backward
        del loss
        circle = [module(X)]
        circle.append(circle)  # type: ignore[arg-type]
        del circle
        with torch.no_grad():
            unused = module(X)
        module(X).mean().backward()
    del unused


def test_a_graph_that_is_held_counts() -> None:
    _, module = one_call()
    held = module(X)
    with pytest.warns(rkmate.RkmateWarning, match=r"2 calls.*calls=2"):
        module(X).mean().backward()
    held.mean().backward()


def test_more_calls_that_fit_need_no_word() -> None:
    module = planned(tower(), X, budget="1GiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        siamese(module).backward()


# -- counted ------------------------------------------------------------------------------


def counted(budget: float | int) -> nn.Sequential:
    return rkmate.apply(tower(), budget=budget, settings=rkmate.Settings(costs="analytic"), progress=False)


def test_calls_of_a_module_with_a_budget_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    module = counted(0.6)
    with caplog.at_level("WARNING", logger="rkmate"):
        for _ in range(3):
            siamese(module).backward()
            module.zero_grad()
    shown = rkmate.applied(module)
    assert shown is not None and shown.plan.calls == 2
    assert len([r for r in caplog.records if "2 times before a backward" in r.getMessage()]) == 1
    assert rkmate.measure_step(module, lambda: siamese(module).backward()).peak <= shown.plan.budget_bytes
    plain = tower()
    siamese(plain).backward()
    siamese(module).backward()
    assert all(torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
               for p, q in zip(plain.parameters(), module.parameters(), strict=True))
    for _ in range(2):                      # a step with more of them
        siamese(module, 3).backward()
    assert shown.plan.calls == 3


def test_a_budget_that_is_too_small_for_the_calls_counted_is_said() -> None:
    module = counted(of_one_call().minimum_bytes or 0)
    siamese(module, 3).backward()
    with pytest.warns(rkmate.RkmateWarning) as caught:
        siamese(module, 3).backward()
    told = [str(w.message) for w in caught]
    assert "3 times before a backward, and no plan for 3 calls" in told[0] and len(told) == 1
    shown = rkmate.applied(module)
    assert shown is not None and shown.plan.calls == 3
    assert f"Steps follow the smallest plan, and take about {shown.plan.peak_bytes:,} bytes" in told[0]
    assert rkmate.measure_step(module, lambda: siamese(module, 3).backward()).peak <= shown.plan.peak_bytes
