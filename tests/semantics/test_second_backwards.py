"""Two losses through one forward: what works, works in every step, and what is refused always is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_step
from rkmate.runtime import plan_cache
from tests.semantics.steps import Heads, Tower, assert_equal, assert_same_gradients, planned, tightest

STEPS = 3
"""The plan of the next step follows the loss of the one before."""


def one_after_the_other(*names: str) -> Callable[[nn.Module, Any], None]:
    def run(model: nn.Module, out: Any) -> None:
        for name in names:
            out[name].sum().backward(retain_graph=True)
    return run


def asked_for(*names: str) -> Callable[[nn.Module, Any], None]:
    def run(model: nn.Module, out: Any) -> None:
        parameters = list(model.parameters())
        for name in names:
            found = torch.autograd.grad(out[name].sum(), parameters, retain_graph=True, allow_unused=True)
            for p, grad in zip(parameters, found, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad + grad
    return run


def step(model: nn.Module, run: Callable[..., Any], backward: Callable[[nn.Module, Any], None]
         ) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(0)
    backward(model, run(torch.ones(4, 8)))
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("trains", ["all", "left", "right"])
@pytest.mark.parametrize("backward", [
    one_after_the_other("left", "right"), one_after_the_other("right", "left"), asked_for("left", "right")])
def test_two_losses_from_two_outputs_work(trains: str, backward: Callable[[nn.Module, Any], None]) -> None:
    model = Heads(dropout=0.2)
    module = planned(model, torch.ones(4, 8), trains=trains)
    expected = step(model, model, backward)
    for _ in range(STEPS):
        with pytest.warns(rkmate.RkmateWarning, match="a second time"):
            assert_equal(expected, step(model, module, backward), close=True)


@pytest.mark.parametrize("trains", ["all", "left", "right"])
@pytest.mark.parametrize("backward", [one_after_the_other, asked_for])
def test_two_losses_from_one_output_work(trains: str, backward: Callable[..., Any]) -> None:
    model = Heads(dropout=0.2)
    module = planned(model, torch.ones(4, 8), trains=trains)
    twice = backward("left", "left")
    expected = step(model, model, twice)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss depends on outputs?", rkmate.RkmateWarning)
        for _ in range(STEPS):
            assert_equal(expected, step(model, module, twice), close=True)


@pytest.mark.parametrize("trains", ["all", "left", "right"])
def test_a_loss_of_both_outputs_goes_through_twice(trains: str) -> None:
    """The gradient of an output that was not planned for comes first, and is not the end of the backward."""
    def twice(model: nn.Module, out: Any) -> None:
        loss = out["left"].sum() + out["right"].sum()
        loss.backward(retain_graph=True)
        loss.backward()

    model = Heads(dropout=0.2)
    module = planned(model, torch.ones(4, 8), trains=trains)
    expected = step(model, model, twice)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rkmate.RkmateWarning)
        for _ in range(STEPS):
            assert_equal(expected, step(model, module, twice), close=True)


def test_a_graph_that_was_not_kept_serves_one_backward() -> None:
    model = Heads(dropout=0.2)
    module = planned(model, torch.ones(4, 8))
    out = module(torch.ones(4, 8))
    (out["left"].sum() + out["right"].sum()).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(rkmate.BackwardError, match=r"add the losses up.*first \+ second"):
        (out["left"].sum() + out["right"].sum()).backward()
    assert all(torch.equal(before[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)


class Averaging(nn.Module):
    """Reads an average that it moves, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1),
                                                    nn.Linear(64, 16)) for _ in range(4)))
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers(x))
        x = x - self.mean.clone() * x
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x


def adaptive(model: nn.Module, out: torch.Tensor) -> None:
    """A weight of two losses from their gradients, as VQGANs have it."""
    last = [*model.parameters()][-2]
    losses = out.abs().mean(), out.cos().mean()
    one, other = (torch.autograd.grad(x, last, retain_graph=True)[0].norm() for x in losses)
    (losses[0] + (one / (other + 1e-4)).detach() * losses[1]).backward()


def projected(model: nn.Module, out: torch.Tensor) -> None:
    """Gradients of tasks without what conflicts with others (PCGrad)."""
    parameters = list(model.parameters())
    found = [torch.cat([g.flatten() for g in torch.autograd.grad(
        (k * out).cos().mean(), parameters, retain_graph=True)]) for k in range(1, 4)]
    total = sum(one - min(torch.zeros(()), one @ other) / other.square().sum() * other
                for one in found for other in found if one is not other)
    for p, g in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        p.grad = g.view_as(p)


def balanced(model: nn.Module, out: torch.Tensor) -> None:
    """Weights of losses from the sizes of their gradients (GradNorm)."""
    weights, shared = torch.ones(2, requires_grad=True), [*model.parameters()][-2]
    losses = [weights[k] * ((k + 1) * out).cos().mean() for k in range(2)]
    sum(losses).backward(retain_graph=True)
    sizes = torch.stack([torch.autograd.grad(x, shared, retain_graph=True, create_graph=True)[0].norm()
                         for x in losses])
    shared.grad += torch.autograd.grad((sizes - sizes.mean().detach()).abs().sum(), weights)[0].sum()


def one_by_one(model: nn.Module, out: torch.Tensor) -> None:
    losses = [(k * out).cos().mean() for k in range(1, 4)]
    for loss in losses:
        loss.backward(retain_graph=loss is not losses[-1])


@pytest.mark.parametrize("way", [adaptive, projected, balanced, one_by_one])
@pytest.mark.parametrize("averages", [False, True])
def test_what_people_do_with_several_backwards(way: Callable[[nn.Module, Any], None], averages: bool) -> None:
    """Each step equals plain training's; once what the caller keeps was seen, it is within the budget."""
    def trained(put: Callable[[nn.Module], Any]) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model: nn.Module = Averaging() if averages else Averaging().layers
        put(model)
        x, found = torch.randn(128, 16), []

        def run() -> None:
            torch.manual_seed(1)
            way(model, model(x))

        for _ in range(4):
            model.zero_grad()
            run()
            found += [t.detach().clone() for p in model.parameters() for t in (p.grad, p) if t is not None]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad  # type: ignore[operator]
        return [*found, *model.buffers()], measure_step(model, run).peak or 0

    if way is balanced and averages:
        module = planned(Averaging(), torch.ones(4, 16))
        with pytest.raises(rkmate.BackwardError, match=r"no double backward.*overwritten"):
            way(module, module(torch.ones(4, 16)))
        return
    expected, peak = trained(lambda model: None)
    with pytest.warns(rkmate.RkmateWarning, match="create_graph=True") if way is balanced else \
            contextlib.nullcontext():
        found, least = trained(lambda model: rkmate.apply(model, budget=int(0.8 * peak), progress=False))
    assert all(map(torch.equal, expected, found))
    assert way is balanced or least <= 0.8 * peak


def test_several_gradients_at_once_are_an_error() -> None:
    model, x = Tower(), torch.ones(4, 16)
    module = planned(model, x)
    y = module(x)
    with pytest.raises(rkmate.BackwardError, match="is_grads_batched"):
        torch.autograd.grad(y, list(model.parameters()), torch.eye(y.numel()).view(-1, *y.shape),
                            is_grads_batched=True)
    del y
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())


def test_a_sum_of_losses_needs_no_second_run() -> None:
    model = Heads(dropout=0.2)
    module = planned(model, torch.ones(4, 8))

    def backward(model: nn.Module, out: Any) -> None:
        (out["left"].sum() + out["right"].sum()).backward()

    for _ in range(STEPS):
        assert_equal(step(model, model, backward), step(model, module, backward))


class Uneven(nn.Module):
    """A narrow way to one output, and a wide one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = Tower(8, 1, 0.0), Tower(64, 3, 0.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.narrow(x[:, :8]), "right": self.wide(x)}


@pytest.mark.parametrize("counted", [False, True])
def test_a_plan_over_the_budget_serves_one_step_alone(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`counted`: the first refusal names a budget that turns out to be too small, too."""
    model, x = Uneven(), torch.randn(32, 64)
    module = tightest(model, x, trains="left")
    refused: list[int] = []

    def executable(*args: Any, **more: Any) -> Any:
        try:
            return own(*args, **more)
        except rkmate.InfeasibleBudget as error:
            refused.append(error.minimum_bytes)
            least = error.minimum_bytes // 2 if len(refused) == 1 else error.minimum_bytes
            raise rkmate.InfeasibleBudget(str(error), least) from None

    if counted:
        own = plan_cache.PlanCache._executable
        monkeypatch.setattr(plan_cache.PlanCache, "_executable", executable)

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        out = run(x)
        return out["left"].sum() + out["right"].sum()

    with pytest.warns(rkmate.RkmateWarning) as said:
        assert_same_gradients(model, module, loss)
    assert any("this step takes that much" in str(w.message) for w in said)
    assert not counted or len(refused) == 2
    with pytest.raises(rkmate.InfeasibleBudget, match="a loss that depends on outputs 0 and 1"):
        module(x)
    assert all(plan.peak_bytes <= plan.budget_bytes == module.plan.budget_bytes
               for plan in module._plans.all())


class Stage(nn.Module):
    """A stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
                                      for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.skipif(torch.__version__.startswith(("2.11.", "2.12.")),
                    reason="torch.autograd.grad takes no edge of a function written in Python")
def test_a_backward_in_two_parts() -> None:
    """Zero-bubble schedules take the gradients of a stage's inputs first, its parameters' later."""
    split = pytest.importorskip("torch.distributed.pipelining._backward")
    stage = Stage()
    xs = [torch.randn(64, 8, requires_grad=True) for _ in range(3)]
    module = rkmate.wrap(stage, (xs[0],), budget=0.6, calls=3, progress=False)

    def step(run: Callable[..., Any], *, later: bool) -> list[torch.Tensor]:
        stage.zero_grad()
        parts, found = [], []
        outputs = [run(x) for x in xs]
        for x, y in zip(xs, outputs, strict=True):
            x.grad = None
            inputs, groups = split.stage_backward_input([y], [torch.ones_like(y)], [x], stage.parameters())
            found += inputs
            parts.append(groups)
            if not later:
                split.stage_backward_weight(stage.parameters(), parts.pop())
        for groups in parts:
            split.stage_backward_weight(stage.parameters(), groups)
        return [*found, *(p.grad.clone() for p in stage.parameters())]

    for later in (True, False):
        assert all(map(torch.equal, step(stage, later=later), step(module, later=later)))


def test_an_input_alone_and_then_all() -> None:
    stage = Stage()
    x = torch.randn(64, 8, requires_grad=True)
    module = rkmate.wrap(stage, (x,), budget=0.6, progress=False)
    found = []
    for run in (stage, module):
        y = run(x)
        slope, = torch.autograd.grad(y.sum(), x, retain_graph=True)
        kept = torch.ones(64, 1024)         # more than any plan leaves
        with pytest.warns(rkmate.RkmateWarning, match="keeps 264,200 bytes") if run is module else \
                contextlib.nullcontext():
            y.square().sum().backward()
        found.append([slope, x.grad, kept, *(p.grad for p in stage.parameters())])
        x.grad = None
        stage.zero_grad()
    assert all(map(torch.equal, *found))
