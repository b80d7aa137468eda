"""Forwards that differentiate by themselves: the inner gradient is part of the plan."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.autograd import grad
from torch.nn import functional as F

import rkmate
from rkmate.errors import CaptureError
from tests.capturing import captured_once
from tests.equality import assert_same_step
from tests.models import Sample
from tests.options import options_of
from tests.semantics.steps import assert_same_gradients, planned, three_budgets, tightest


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32),
                         nn.Softplus(), nn.Linear(32, 1))


class Forces(nn.Module):
    """An energy and its slope, as the loss on forces needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.detach().requires_grad_()
        distances = (places[:, None] - places[None]).square().sum(-1)
        energy = self.net(places).sum() + torch.exp(-distances).sum()
        slope, = grad(energy, places, create_graph=True)
        return energy, -slope


class Penalty(nn.Module):
    """A critic with the penalty of its slope between two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 3, 2, 1),
                                    nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        share = torch.rand(len(real), 1, 1, 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        slope, = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        far = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * far


def _forces_loss(found: Any) -> torch.Tensor:
    energy, forces = found
    return energy.square() + (forces - 1).square().sum()


@pytest.mark.parametrize(("kind", "args", "options", "loss"), [
    pytest.param(Forces, (torch.randn(8, 3),), {"trains": "all"}, _forces_loss, marks=pytest.mark.slow),
    (Penalty, (torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)), {}, lambda loss: loss)])
def test_the_step_is_the_originals(kind: type[nn.Module], args: tuple[torch.Tensor, ...],
                                   options: dict[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, original = kind(), kind()
    for module in three_budgets(model, *args, **options):
        original.load_state_dict(model.state_dict())
        original.zero_grad()
        model.zero_grad()
        assert_same_step(original, module, Sample(module, args, {}, loss))
    assert module.plan.peak_bytes < module.plan.baseline_peak_bytes
    assert module.plan.schedule.recomputed()


class Pairs(nn.Module):
    """An energy of pairs of atoms, of which masks and counts among the arguments say which there are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, places: torch.Tensor, of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.detach().requires_grad_()
        i, j = torch.where((of[:, None] == of) & ~torch.eye(len(of), dtype=torch.bool))
        each = self.net(places[i] - places[j])
        energy = torch.zeros(int(of.max()) + 1, 1).index_add(0, of[i], each)
        slope, = grad(energy.sum(), places, create_graph=True)
        return energy, -slope


def test_indices_that_values_of_arguments_or_constants_decide() -> None:
    torch.manual_seed(0)
    model = Pairs()
    original = copy.deepcopy(model)
    molecules = torch.tensor([0] * 4 + [1] * 3), torch.tensor([0] * 3 + [1] * 4)
    module = planned(model, torch.randn(7, 3), molecules[0], trains="all")
    for of in (*molecules, molecules[0]):
        assert_same_step(original, module, Sample(
            module, (torch.randn(7, 3), of), {}, lambda found: found[0].sum() + found[1].square().sum()))
        assert module.has_plan


class Leaves(nn.Module):
    """Hands out the leaf that a slope outside is asked of."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.net, self.keeps = _net(), keeps

    def forward(self, places: torch.Tensor) -> Any:
        places = places.clone().detach().requires_grad_()
        if self.keeps:
            self.places = places
        return self.net(places) if self.keeps else (self.net(places), places)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_leaf_that_the_forward_makes_and_hands_out_is_refused_and_has_its_gradient_by_parts(
        keeps: bool) -> None:
    model, x = Leaves(keeps), torch.randn(64, 3)
    original = copy.deepcopy(model)
    with pytest.raises(CaptureError, match=r"called requires_grad_\(\)"):
        planned(model, x)
    rkmate.apply(model, budget=0.9, **options_of(costs="analytic", progress=False))
    for _ in range(3):
        slopes = []
        for module in (original, model):
            made = module(x)
            made, places = (made, module.places) if keeps else made
            slopes.append(grad(made.sum(), places)[0])
        assert torch.equal(*slopes)


class CallsBackward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.sum().backward(retain_graph=True)
        return y


def test_a_backward_in_the_forward_is_refused() -> None:
    with pytest.raises(rkmate.CaptureError, match=r"test_inner_gradients.py:\d+.*calls backward\(\)"):
        planned(CallsBackward(4, 4), torch.randn(2, 4))


class Linearizes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, slope = torch.func.linearize(super().forward, x)
        total: torch.Tensor = y + slope(x)
        return total


class Pushes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, slope = torch.func.jvp(super().forward, (x,), (x,))
        total: torch.Tensor = y + slope.detach()
        return total


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning:torch.fx")
def test_a_function_that_is_linearized_is_refused_with_what_to_call_instead() -> None:
    with pytest.raises(rkmate.CaptureError, match=r"test_inner_gradients.py:\d+.*linearize.*torch.func.jvp"):
        planned(Linearizes(4, 4), torch.randn(2, 4))
    model, x = Linearizes(4, 4), torch.randn(2, 4)
    instead = Pushes(4, 4)
    instead.load_state_dict(model.state_dict())
    module = planned(instead, x)
    for run in (model, module):
        run(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, instead.get_parameter(name).grad)


def test_other_threads_train_while_a_forward_is_captured() -> None:
    class Waits(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: other(torch.ones(2, 4)).sum().backward())
            thread.start()
            thread.join()
            return super().forward(x).tanh()

    other = nn.Linear(4, 4)
    rkmate.wrap(Waits(4, 4), (torch.randn(2, 4),), budget=1.0, progress=False,
                settings=rkmate.Settings(costs="analytic"))
    assert other.bias.grad is not None


def test_an_input_without_gradient_fails_as_in_the_original() -> None:
    class Slope(Forces):
        def forward(self, places: torch.Tensor) -> torch.Tensor:
            slope, = grad(self.net(places).sum(), places, create_graph=True)
            return slope.sum()

    with pytest.raises(rkmate.CaptureError, match="does not require grad"):
        planned(Slope(), torch.randn(8, 3))


class Transforms(nn.Module):
    """Derivatives of a small network by the transforms of torch.func."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), kind

    def _energy(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x).sum()
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        weights = dict(self.net.named_parameters())
        if self.kind == "grad":
            found = func.grad(self._energy)(x)
        elif self.kind == "of each row":
            found = func.vmap(func.grad(self._energy))(x)
        elif self.kind == "vjp":
            out, back = func.vjp(self.net, x)
            found, = back(torch.ones_like(out))
        elif self.kind == "of weights":
            slopes = func.grad(lambda w: func.functional_call(self.net, w, (x,)).square().mean())(weights)
            found = func.functional_call(self.net, {k: w - 0.1 * slopes[k] for k, w in weights.items()}, (x,))
        else:
            transform = {"jacrev": func.jacrev, "jacfwd": func.jacfwd, "hessian": func.hessian}[self.kind]
            found = func.vmap(transform(self._energy))(x)
        return found


OF_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad": lambda h: func.grad(lambda z: z.pow(3).sum())(h),
    "grad and value": lambda h: func.grad_and_value(lambda z: z.exp().mean())(h)[0],
    "of each row": lambda h: func.vmap(func.grad(lambda z: z.exp().sum()))(h),
    "vjp": lambda h: func.vjp(torch.exp, h)[1](h)[0],
    "jvp": lambda h: func.jvp(torch.exp, (h,), (h,))[1],
    "jacrev": lambda h: func.jacrev(lambda z: z[:3, :2].exp())(h).sum((0, 1)),
    "hessian": lambda h: func.hessian(lambda z: z.exp().sum())(h[0, :4]),
    "hessian of what is decomposed": lambda h: func.hessian(lambda z: F.softplus(z).sum())(h[0, :4]),
    "jvp of grad": lambda h: func.jvp(func.grad(lambda z: F.softplus(z).sum()), (h,), (h,))[1],
    "grad of jvp": lambda h: func.grad(lambda z: func.jvp(F.softplus, (z,), (h,))[1].sum())(h),
}


@pytest.mark.parametrize("kind", OF_ACTIVATIONS)
def test_transforms_of_activations(kind: str) -> None:
    """An export loses the operations of such a transform, and keeps what its trace has computed."""
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            return h.sum() + OF_ACTIVATIONS[kind](h)

    torch.manual_seed(0)
    model, x = Slopes(), torch.randn(4, 8)
    with captured_once():
        modules = planned(model, x), tightest(model, x)
    for module in modules:
        assert_same_gradients(model, module, lambda run: run(x).square().sum())


@pytest.mark.parametrize("kind", ["grad", "of each row", "vjp", "of weights", "jacrev", "jacfwd", "hessian"])
def test_transforms_of_torch_func(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Transforms(kind), torch.randn(4, 3)
    for wrapper in (planned, tightest):
        assert_same_gradients(model, wrapper(model, x), lambda run: run(x).square().sum())


def test_a_transform_of_a_tensor_that_is_closed_over_is_refused() -> None:
    """Its gradient would be lost without a word, inside of a transform, too."""
    outside = torch.randn(3, requires_grad=True)

    class Closed(Transforms):
        def _energy(self, x: torch.Tensor) -> torch.Tensor:
            return super()._energy(x * outside)

    with pytest.raises(rkmate.CaptureError, match="does not find as a parameter"):
        planned(Closed("grad"), torch.randn(4, 3))


class Targets(nn.Module):
    """A teacher's result, which no gradient goes through, as a decorated method and a region compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    @torch.inference_mode()
    def taught(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the net says of a neighbour."""
        return self.net(x + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = self.net(x * 2).square().mean()
            with torch.inference_mode(False):
                inner = self.net(x * 3)
        return self.net(x) * scale.clone() + self.taught(x).clone() + inner * 0.5


def test_nothing_goes_through_a_region_of_inference() -> None:
    torch.manual_seed(0)
    model, x = Targets(), torch.randn(8, 3)
    assert_same_gradients(model, planned(model, x), lambda run: run(x).pow(3).sum())
