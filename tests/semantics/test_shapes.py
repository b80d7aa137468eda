"""Calls with other shapes than planned."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ilp import solve_all
from tests.equality import assert_same_step
from tests.models import Sample
from tests.semantics.steps import Tower, assert_same_gradients, planned
from tests.semantics.test_control_flow import OnFlag


def test_each_shape_has_a_plan_and_one_notice_is_given(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Tower(dropout=0.2), torch.randn(32, 16)
    module = planned(model, x, budget=0.95)
    with caplog.at_level(logging.WARNING, logger="rkmate"):
        for rows in (32, 20, 24, 20, 32):
            assert_same_gradients(model, module, lambda run, n=rows: run(x[:n]).pow(2).sum())
    assert len([r for r in caplog.records if "differs from the planned ones in the shapes" in r.message]) == 1
    assert len(module._plans) == 3


def test_a_fraction_is_of_a_larger_shapes_own_peak_and_never_fewer_bytes() -> None:
    model, x = Tower(), torch.randn(64, 16)
    module = planned(model, x[:32], budget=0.9)
    first = module.plan
    module(x).sum().backward()
    assert module.plan.budget_bytes == int(0.9 * module.plan.baseline_peak_bytes) > first.budget_bytes
    module(x[:31]).sum().backward()
    assert module.plan.budget_bytes > first.budget_bytes


def test_bytes_are_the_same_for_every_shape_and_may_not_suffice() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x, budget=planned(model, x).plan.peak_bytes)
    module(x[:4])
    assert module.plan.budget_bytes == planned(model, x).plan.peak_bytes
    with pytest.raises(rkmate.InfeasibleBudget, match=r"inputs of shape \(512, 16\)") as caught:
        module(torch.randn(512, 16))
    assert caught.value.minimum_bytes > module.plan.budget_bytes
    assert_same_gradients(model, module, lambda run: run(x).sum())


def test_refused_shapes() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x, on_new_shape="error")
    with pytest.raises(rkmate.ArgumentError, match=r"in the shapes, dtypes.* and on_new_shape"):
        module(x[:3])
    module(x).sum().backward()


def test_other_constants_dtypes_and_autocast_are_other_calls() -> None:
    x = torch.randn(4, 8)
    module = planned(OnFlag(8, 8), x, on_new_shape="error")
    with pytest.raises(rkmate.ArgumentError, match="in how its arguments are put together"):
        module(x, double=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), \
            pytest.raises(rkmate.ArgumentError, match="in the autocast state; and on_new_shape"):
        module(x)
    ids = torch.tensor([1, 2])
    table = planned(torch.nn.Embedding(10, 8), ids, on_new_shape="error")
    with pytest.raises(rkmate.ArgumentError, match="on_new_shape"):
        table(ids.int())


def test_a_plan_made_again_solves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []
    solve = solve_all.block_options

    def counted(*args: Any, **kwargs: Any) -> Any:
        solved.append(1)
        return solve(*args, **kwargs)

    monkeypatch.setattr(solve_all, "block_options", counted)
    x = torch.randn(37, 16)
    module = planned(Tower(dropout=0.2, depth=5), x, budget=0.9)
    first = len(solved)
    assert first
    module._plans.kept.clear()
    module(x).sum().backward()
    assert len(module._plans) == 1
    assert len(solved) == first


def test_the_original_for_other_shapes() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x, on_new_shape="original")
    with pytest.warns(rkmate.RkmateWarning, match=r"in the shapes, dtypes.*: the original module runs"):
        module(x[:3]).sum().backward()
    module(x[:2]).sum().backward()          # said once
    assert len(module._plans) == 1


def test_the_least_recently_used_plan_goes_first() -> None:
    model, x = Tower(depth=1), torch.randn(40, 16)
    module = planned(model, x[:1])
    one = module._plans.kept.all()[0].bytes
    module = planned(model, x[:1], settings=rkmate.Settings(costs="analytic", kept_plans_bytes=5 * one))
    for rows in range(2, 9):
        module(x[:rows])
        module(x[:1])
    kept = {key[2][0][0][0] for key in module._plans.kept.signatures()}
    assert 1 < len(kept) <= 6
    assert {1, 8} <= kept                        # used last; 2 and 3 are what others are derived from
    assert 4 not in kept


def test_other_strides() -> None:
    model, x = Tower(), torch.randn(16, 16)
    module = planned(model, x)
    assert_same_gradients(model, module, lambda run: run(x.t()).pow(2).sum())
    assert len(module._plans) == 2


@pytest.mark.parametrize("loss", [
    lambda y: torch.stack([torch.zeros_like(y)] * 3 + [y, y.detach()], -1).sin().square().sum(),
    lambda y: y.t().contiguous().sin().square().sum(), torch.sum])
def test_a_gradient_with_strides_of_its_own(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The gradient of a last bias adds it up as it lies in memory, as in eager mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 24))
    sample = Sample(model, (torch.randn(531, 4),), {}, loss)
    assert_same_step(model, planned(copy.deepcopy(model), *sample.args), sample)
