"""Hooks that torch runs around every module of the process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import rkmate
from rkmate.torch_seam.patches.modules import _forward_places
from tests.options import options_of
from tests.semantics.steps import assert_same_gradients, planned


def _agree(model: nn.Module, module: rkmate.PlannedModule, x: torch.Tensor, plans: int) -> None:
    assert torch.equal(module(x), model(x))
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
    assert len(module._plans) == plans


def test_hooks_around_every_module() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    module = planned(model, x)
    handle = register_module_forward_hook(lambda m, args, y: 2 * y if isinstance(m, nn.Linear) else None)
    try:
        with pytest.warns(rkmate.RkmateWarning, match="forward hooks around every module"):
            module(x)
        _agree(model, module, x, plans=2)
    finally:
        handle.remove()
    _agree(model, module, x, plans=2)
    handle = register_module_full_backward_hook(lambda *args: None)
    try:
        with pytest.raises(rkmate.CaptureError, match="backward hooks around every module"):
            planned(model, x)
    finally:
        handle.remove()
    with ModuleTracker():
        _agree(model, module, x, plans=2)


def test_a_first_call_may_be_counted() -> None:
    model = rkmate.apply(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), budget=1.0,
                         **options_of(costs="analytic", progress=False))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    rkmate.remove(plain)
    with FlopCounterMode(display=False) as counter:
        model(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    assert counter.get_total_flops() and rkmate.applied(model).has_plan
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_they_run_around_the_models_own_modules() -> None:
    around: list[str] = []
    handle = register_module_forward_hook(lambda m, args, y: around.append(type(m).__name__))
    try:
        with pytest.warns(rkmate.RkmateWarning, match="forward hooks around every module"):
            planned(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    finally:
        handle.remove()
    assert set(around) == {"Linear", "ReLU", "Sequential"}


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_what_would_change_the_models_own_result_twice_is_refused(register: Any) -> None:
    def doubled(m: nn.Module, args: tuple[Any, ...], *result: Any) -> Any:
        if result:
            return 2 * result[0] if isinstance(result[0], torch.Tensor) else None
        return tuple(2 * a for a in args) if all(isinstance(a, torch.Tensor) for a in args) else None

    handle = register(doubled)
    hooks = [dict(place) for place in _forward_places()]
    try:
        with pytest.raises(rkmate.CaptureError, match="a second time around the planned module"), \
                warnings.catch_warnings():
            warnings.simplefilter("ignore", rkmate.RkmateWarning)
            planned(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
        assert hooks == [dict(place) for place in _forward_places()]
    finally:
        handle.remove()


def test_a_backward_hook_in_the_place_of_a_forward_one_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    handle = register_module_forward_hook(lambda *args: None)
    try:
        with pytest.warns(rkmate.RkmateWarning, match="forward hooks around every module"):
            module = planned(model, x)
    finally:
        handle.remove()
    handle = register_module_full_backward_hook(lambda *args: None)
    try:
        with pytest.warns(rkmate.RkmateWarning, match="the original module runs instead.*backward hooks"):
            module(x)
    finally:
        handle.remove()
