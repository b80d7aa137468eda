"""A double backward around a planned module: gradient penalties, products with Hessians."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from tests.semantics.steps import Heads, Tower, planned

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""Runs a module and returns a loss that has a gradient of it inside."""


def penalty(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As of WGAN-GP, with the losses of two other calls."""
    between = (x * 0.5).requires_grad_()
    slope, = torch.autograd.grad(module(between).sum(), between, create_graph=True)
    return module(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def on_real(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As of R1: the very forward that is penalised has a loss, too."""
    x = x.clone().requires_grad_()
    out = module(x)
    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.softplus(out).mean() + slope.square().sum()


def curvature(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Its gradient is a product with the Hessian."""
    found = torch.autograd.grad(module(x).square().mean(), list(module.parameters()), create_graph=True)
    return sum(((g * (k + 1)).sum() for k, g in enumerate(found)), torch.zeros(()))


def twice_the_same(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    slope, = torch.autograd.grad((module(x) * module(x)).sum(), x, create_graph=True)
    return slope.square().mean()


def gradients(module: nn.Module, step: Step, x: torch.Tensor) -> dict[str, Any]:
    module.zero_grad()
    torch.manual_seed(0)
    step(module, x).backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    return {**found, "drawn": torch.rand(3)}


def same(model: nn.Module, module: nn.Module, step: Step, x: torch.Tensor, within: float = 1e-5) -> None:
    """Up to rounding: what comes along both derivatives is added up in another order."""
    expected = gradients(model, step, x)
    with warnings.catch_warnings():
        for said in ("a backward with create_graph", "2 calls of this module", "the loss depends on output"):
            warnings.filterwarnings("ignore", said, rkmate.RkmateWarning)
        actual = gradients(module, step, x)
    assert expected.keys() == actual.keys()
    assert torch.equal(expected.pop("drawn"), actual.pop("drawn"))
    largest = max(g.norm() for g in expected.values() if g is not None)    # one may be rounding alone
    for name, gradient in expected.items():
        other = actual[name]
        if gradient is None or other is None:
            assert gradient is None and (other is None or not other.any())
        else:
            assert (other - gradient).norm() <= within * largest, name


class Normed(nn.Module):
    """With a batch norm: statistics that a second run must not move."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 24), norm(24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@functools.cache
def normed(norm: Callable[[int], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Plain, and wrapped for inputs with and without a gradient."""
    torch.manual_seed(0)
    model = Normed(norm)
    return model, planned(copy.deepcopy(model), X.clone().requires_grad_())


@pytest.mark.parametrize(("norm", "step"), [
    (nn.BatchNorm1d, on_real), (nn.BatchNorm1d, curvature), (nn.LayerNorm, penalty),
    (nn.LayerNorm, twice_the_same)])
def test_gradients_of_gradients(norm: Callable[[int], nn.Module], step: Step) -> None:
    model, module = normed(norm)
    same(model, module, step, X)
    same(model, module, step, X)
    for (name, mine), theirs in zip(module.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_it_is_said_once_that_the_budget_does_not_hold() -> None:
    module = planned(Tower(), X)
    with pytest.warns(rkmate.RkmateWarning, match="outside of the budget"):
        curvature(module, X)
    curvature(module, X)                # a second warning would be an error


def test_a_plan_in_place() -> None:
    model = Tower(dropout=0.2)
    applied = rkmate.apply(copy.deepcopy(model), (X,), budget=1.0, progress=False,
                           settings=rkmate.Settings(costs="analytic"))
    same(model, applied, curvature, X)


def test_outputs_that_were_not_planned_for() -> None:
    model = Heads(dropout=0.2)
    module = planned(copy.deepcopy(model), torch.ones(4, 8), trains="left")

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        out = module(x)
        loss = out["right"].square().sum() + out["left"].sum()
        found = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        return sum((g.square().sum() for g in found), torch.zeros(()))

    same(model, module, step, torch.ones(4, 8))


@pytest.mark.slow
def test_an_autocast_forward() -> None:
    model = Tower()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = planned(copy.deepcopy(model), X)

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        found = torch.autograd.grad(out.float().square().sum(), list(module.parameters()), create_graph=True)
        return sum((g.square().sum() for g in found), torch.zeros(()))

    same(model, module, step, X, within=0.02)      # gradients of weights are bfloat16 before the sum


def _moved(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1.0)


@pytest.mark.parametrize(("change", "why"), [
    (_moved, "was changed in place"), (lambda model: model.eval(), "the module was changed")])
def test_what_has_changed_since_is_an_error(change: Callable[[Any], None], why: str) -> None:
    module = planned(Tower(dropout=0.2), X)
    loss = module(X).sum()
    change(module)
    with pytest.raises(rkmate.BackwardError, match=why):
        torch.autograd.grad(loss, list(module.parameters()), create_graph=True)


class Counting(nn.Linear):
    """Reads a buffer that it overwrites."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * self.seen.clone()
        self.seen.mul_(0.5)
        return out


def test_a_forward_that_cannot_run_again_is_an_error() -> None:
    module = planned(Counting(), X)
    loss = module(X).square().sum()
    with pytest.raises(rkmate.BackwardError, match=r"no double backward.*overwritten 'seen'"):
        torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    loss.backward()                                     # an ordinary one


@pytest.mark.parametrize("keeps", [True, False])
def test_after_an_ordinary_backward(keeps: bool) -> None:
    """It works where that has kept the graph; several of them share one second run of the original."""
    model = Tower()
    module = planned(model, X)
    found = []
    for run in (model, module):
        loss = run(X).sum()
        loss.backward(retain_graph=keeps)
        if not keeps and run is module:
            with pytest.raises(rkmate.BackwardError, match="through a backward already"):
                torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        elif keeps:
            with pytest.warns(rkmate.RkmateWarning, match="create_graph=True") if run is module else \
                    contextlib.nullcontext():
                slopes = [torch.autograd.grad(k * loss, list(model.parameters()), create_graph=True)
                          for k in range(1, 3)]
            sum(s.square().sum() for some in slopes for s in some).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert not keeps or all(map(torch.equal, *found))


def test_several_inner_steps_differentiate_the_parameters_of_their_call() -> None:
    """MAML: each inner step calls the module with parameters that the one before has computed."""
    def step(model: nn.Module) -> list[torch.Tensor]:
        fast = dict(model.named_parameters())
        for _ in range(3):
            loss = torch.func.functional_call(model, fast, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
        torch.func.functional_call(model, fast, (x,)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    x = torch.randn(16, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    plain = copy.deepcopy(model)
    rkmate.apply(model, budget=1.0, settings=rkmate.Settings(costs="analytic"), progress=False)
    with pytest.warns(rkmate.RkmateWarning, match=r"budget of [\d,]+ bytes \(.* about [\d,]+ bytes\)"):
        found = step(model)
    expected = step(plain)
    assert len(found) == len(expected) == 4
    torch.testing.assert_close(found, expected)


def test_a_second_run_takes_all_that_its_call_was_given() -> None:
    """`functional_call` with other frozen parameters and buffers than the module's."""
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = nn.Linear(8, 16), nn.Linear(16, 8).requires_grad_(False)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.frozen(torch.tanh(self.trained(x))) * self.scale
            return scaled

    def step(model: nn.Module) -> torch.Tensor:
        loss = torch.func.functional_call(model, others, (x,)).square().mean()
        weight = model.get_parameter("trained.weight")
        inner, = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(inner.square().sum(), weight)[0]

    torch.manual_seed(0)
    x, model = torch.randn(16, 8, dtype=torch.float64), Scaled().double()
    others = {"frozen.weight": torch.randn(8, 16).double(), "scale": torch.tensor(5.0).double()}
    expected = step(copy.deepcopy(model))
    rkmate.apply(model, budget=1.0, settings=rkmate.Settings(costs="analytic"), progress=False)
    with pytest.warns(rkmate.RkmateWarning, match="create_graph=True runs the original's forward once more"):
        torch.testing.assert_close(step(model), expected)
