"""Hooks that torch runs around every module of the process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.utils.module_tracker import ModuleTracker

import rkmate
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
