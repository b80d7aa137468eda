"""Steps that do something that no plan knows of: they are measured, and told of with both figures."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.measure.step import measure_step

X = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
FEW = X[:32]
Step = Callable[[nn.Module], tuple[torch.Tensor, ...]]
"""From a model to a loss, and outputs that the training loop names, too."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))))


def adapted(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Meta-learning: the loss of weights that a step of descent has made."""
    weights = dict(model.named_parameters())
    inner = torch.func.functional_call(model, weights, (X,)).abs().mean()
    grads = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
    moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
    return F.mse_loss(torch.func.functional_call(model, moved, (X,)), X),


def pairs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """The input of the second call is made after the first call."""
    first = model(X)
    second = model(X.repeat(4, 1).sin()[:96])
    return F.mse_loss(first, second), first, second


def whole_pairs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Two calls on one input that was there before."""
    first, second = model(X), model(X)
    return F.mse_loss(first, second), first, second


def made_weights(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Weights that the step makes, before the call."""
    weights = {n: 1.5 * w for n, w in model.named_parameters()}
    out = torch.func.functional_call(model, weights, (FEW,))
    return out.abs().mean(), out


def do(step: Step, model: nn.Module) -> None:
    """Do a step."""
    loss, *_outputs = step(model)
    loss.backward()


def trained(model: nn.Module, step: Step, steps: int = 8) -> list[str]:
    """Train, and return what is said of measured steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            do(step, model)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in said if ": a step takes " in str(w.message)]


def turned(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Virtual adversarial training: of three calls, the second is finished while the first is open."""
    first = model(X)
    target, way = first.detach().softmax(-1), X.cos().requires_grad_()
    near = F.kl_div(model(X + 0.1 * way).log_softmax(-1), target, reduction="batchmean")
    way = F.normalize(torch.autograd.grad(near, way)[0], dim=1)
    last = model(X + way)
    return F.mse_loss(first, X) + F.kl_div(last.log_softmax(-1), target, reduction="batchmean"), first, last


@pytest.mark.parametrize(("step", "why", "wraps"), [
    (adapted, "backwards with create_graph=True run", False),
    (adapted, "backwards with create_graph=True run", True),
    (pairs, "a step calls Sequential several times", True),
    (made_weights, "the step makes the weights of Sequential", False),
    (made_weights, "the step makes the weights of Sequential", True)])
def test_the_warning_names_the_bytes_of_the_step_and_the_budget(step: Step, why: str, wraps: bool) -> None:
    settings = rkmate.Settings(costs="analytic", calls=1 + (wraps and step is pairs))
    sample = FEW if step is made_weights else X
    given = rkmate.plan(net(), (sample,), budget=0.7, settings=settings, progress=False).budget_bytes
    model = rkmate.wrap(net(), (sample,), budget=given, settings=settings, progress=False) if wraps else \
        rkmate.apply(net(), budget=given, settings=settings, progress=False)
    told = trained(model, step)
    assert len(told) == 1 and told[0].startswith(why)
    takes, budget = (int(n.replace(",", "")) for n in re.findall(r"(?:takes|budget is) ([\d,]+)", told[0]))
    assert budget == given
    for p in model.parameters():                # a measurement finds gradients of its own
        p.grad = torch.zeros_like(p)
    before = sum(p.nbytes for p in model.parameters()) if step is made_weights else 0
    assert takes + before == pytest.approx(
        measure_step(model, lambda: do(step, model)).peak, rel=0.02)
    assert not trained(model, step)


def test_a_step_that_keeps_to_its_budget_is_not_told_of() -> None:
    model = rkmate.apply(net(), budget=0.7, settings=rkmate.Settings(costs="analytic"), progress=False)
    assert not trained(model, whole_pairs)
    assert not model._compiled_call_impl.whole._unusual._remedies     # type: ignore[union-attr, operator]


@pytest.mark.parametrize("step", [pairs, turned])
@pytest.mark.parametrize("share", [0.8, 0.7, 0.6])
def test_plans_leave_room_for_what_stands_between_calls(step: Step, share: float) -> None:
    """Both calls have plans that are smaller by what the step was measured to take on top of them."""
    model, plain = net(), net()
    budget = int(share * measure_step(plain, lambda: do(step, plain)).peak)
    rkmate.apply(model, budget=budget, settings=rkmate.Settings(costs="analytic"), progress=False)
    assert not trained(model, step)
    for each in (model, plain):                 # a measurement finds gradients of its own
        each.zero_grad()
    assert measure_step(model, lambda: do(step, model)).peak <= budget
