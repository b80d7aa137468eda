"""Layers of DeepSpeed's ZeRO stage 3, which a stand-in with one rank gathers and releases as DeepSpeed does:
in hooks around a module's forward, and in autograd functions around its backward. The parameters stay the
same objects, and have no elements in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.parts.one_budget import sharded_layers
from rkmate.pipeline.settings import Settings
from rkmate.torch_seam.modules import is_sharded

WIDTH, STEPS = 32, 6
CHOSEN: dict[str, Any] = {"progress": False, "settings": Settings(costs="analytic")}


class _Around(torch.autograd.Function):
    """The identity; its backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, then: Any) -> torch.Tensor:
        """Return the input."""
        ctx.then = then
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient as it is."""
        ctx.then()
        return grad, None


class _Zero:
    """Prepares a model as `deepspeed.initialize` does."""

    def __init__(self, model: nn.Module, leaves: type[nn.Module] | None = None) -> None:
        """`leaves`: the class that is given to `set_z3_leaf_modules`."""
        self.whole = {p: p.data for p in model.parameters()}
        for m in model.modules():
            if leaves is not None and isinstance(m, leaves):
                m._z3_leaf = True                       # type: ignore[assignment]
        for k, p in enumerate(model.parameters()):
            p.ds_id = k                                 # type: ignore[attr-defined]
            self._release(p)
        self._prepare(model)

    def _release(self, p: nn.Parameter) -> None:
        p.data = torch.empty(0)

    def _prepare(self, module: nn.Module) -> None:
        leaf = getattr(module, "_z3_leaf", False)
        module.ds_id = 0                                # type: ignore[assignment]
        own = [*module.parameters(recurse=leaf)]

        def gather() -> None:
            for p in own:
                p.data = self.whole[p].clone()

        def release() -> None:
            for p in own:
                self._release(p)

        def before(_: nn.Module, args: Any) -> Any:
            gather()
            return tuple(_Around.apply(a, release) if a.requires_grad else a for a in args)

        def after(_: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
            release()
            return _Around.apply(result, gather)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        for child in () if leaf else module.children():
            self._prepare(child)

    def step(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Train, and return the gradients."""
        found = {}
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                found[name] = p.grad
                self.whole[p].sub_(p.grad, alpha=0.1)
                p.grad = None
                self._release(p)
        return found


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _trained(model: nn.Module, zero: _Zero) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Return the gradients of some steps, and the peak of the last one."""
    gradients, peak = [], 0
    for k in range(STEPS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(k))
        if k < STEPS - 1:
            model(x).backward()
        else:
            peak = devices.of(x).measure_peak(lambda x=x: model(x).backward()).peak
        gradients.append(zero.step(model))
    return gradients, peak


@pytest.mark.parametrize("before", [False, True])
def test_layers_are_planned_where_they_are_gathered(before: bool) -> None:
    torch.manual_seed(0)
    model = _Model()
    plain, plain_peak = _trained(other := copy.deepcopy(model), _Zero(other, _Layer))
    budget = plain_peak * 3 // 4
    if before:
        rkmate.apply(model, budget=budget, **CHOSEN)
    zero = _Zero(model, _Layer)
    if not before:
        rkmate.apply(model, budget=budget, **CHOSEN)
    planned, peak = _trained(model, zero)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(plain, planned, strict=True) for name in a)
    assert all(rkmate.applied(layer).has_plan for layer in model.layers)    # type: ignore[union-attr]
    assert rkmate.applied(model.head) is None
    assert peak <= budget


def test_modules_that_are_gathered() -> None:
    model = _Model()
    _Zero(model, _Layer)
    assert sharded_layers(model) == [*model.layers]
    assert [m for m in model.modules() if is_sharded(m)] == [*model.layers, model.head]


@pytest.mark.parametrize("before", [False, True])
def test_a_model_without_named_layers_is_refused(before: bool) -> None:
    model = _Model()
    if not before:
        _Zero(model)
        with pytest.raises(rkmate.ArgumentError, match=r"0\.norm\.weight is sharded by .*set_z3_leaf"):
            rkmate.apply(model, budget=0.5, **CHOSEN)
        return
    rkmate.apply(model, budget=0.5, **CHOSEN)
    _Zero(model)
    with pytest.raises(rkmate.ArgumentError, match="set_z3_leaf_modules"):
        model(torch.randn(4, WIDTH))


def test_parameters_that_are_spread_before_initialize() -> None:
    """A model that is built under `deepspeed.zero.Init` can be given its budget before it is prepared; `wrap`
    plans at once, and cannot."""
    model = _Model()
    for parameter in model.parameters():
        parameter.ds_id = 0                             # type: ignore[attr-defined]
    rkmate.apply(model, budget=0.5, **CHOSEN)
    rkmate.remove(model)
    with pytest.raises(rkmate.ArgumentError, match=r"0\.norm\.weight is sharded by DeepSpeed's ZeRO stage 3"):
        rkmate.wrap(model, (torch.randn(4, WIDTH),), budget=0.5, **CHOSEN)
