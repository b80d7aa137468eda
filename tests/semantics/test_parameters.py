"""Which parameters get gradients, how, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_peak
from tests.semantics.steps import (
    Tower,
    assert_same_gradients,
    noting_segments,
    planned,
    tightest,
)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight
            self.middle = nn.Linear(8, 8)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.middle(self.embed(i))))

    model, i = Tied(), torch.randint(0, 11, (3, 5))
    for wrapper in (planned, tightest):
        module = wrapper(model, i)
        assert module.head.weight is module.embed.weight
        assert_same_gradients(model, module, lambda run: run(i).pow(2).sum())


def test_gradients_of_tied_weights_take_no_more_than_both() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(2000, 16), nn.Linear(16, 2000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(torch.tanh(self.embed(i))), i)

    model, i = Wide(), torch.randint(0, 2000, (8,))
    for wrapper in (planned, tightest):
        module = wrapper(model, i)
        module(i).backward()                   # the gradients have memory from here on

        def step(module: nn.Module = module) -> None:
            module(i).backward()

        assert measure_peak(step).peak <= module.plan.budget_bytes < 3 * model.embed.weight.nbytes


def test_a_layer_used_in_several_places() -> None:
    class Twice(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(super().forward(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(8, 16)
    for wrapper in (planned, tightest):
        module = wrapper(model, x)
        assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
    assert len(module.plan.blocks) > 1
    seen: list[torch.Tensor] = []
    model.zero_grad()
    model.layers[0].weight.register_hook(lambda g: seen.append(g.clone()))
    module(x).pow(2).sum().backward()
    assert len(seen) == 1                          # the whole sum, once
    assert torch.equal(seen[0], model.layers[0].weight.grad)


def test_frozen_weights_get_nothing_and_cost_nothing() -> None:
    x = torch.randn(8, 16)
    whole = planned(Tower(), x)
    model = Tower()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    module = planned(model, x)
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
    assert module.source.count(".mm(") < whole.source.count(".mm(")


def test_unused_parameters_keep_no_gradient() -> None:
    model, x = Tower(), torch.randn(8, 16)
    model.unused = nn.Linear(3, 3)
    assert_same_gradients(model, planned(model, x), lambda run: run(x).sum())
    assert model.unused.weight.grad is None


def test_adapters_on_frozen_weights() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(3) for m in (Adapted(), nn.GELU())])
    x = torch.randn(8, 16)
    for wrapper in (planned, tightest):
        assert_same_gradients(model, wrapper(model, x), lambda run: run(x).pow(2).sum())
    assert model[0].weight.grad is None


def test_padding_index() -> None:
    model = nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 8), nn.Tanh())
    i = torch.tensor([[0, 3, 3], [2, 0, 9]])
    assert_same_gradients(model, planned(model, i), lambda run: run(i).sum())


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(rkmate.CaptureError, match="gradient of weight is sparse"):
        planned(nn.Embedding(10, 8, sparse=True), torch.tensor([1, 2]))


def test_hooks_fire_once_a_step_from_the_last_block_to_the_first() -> None:
    model, x = Tower(depth=16), torch.randn(64, 16)
    module = tightest(model, x)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, n=name: order.append(f"gradient {n}"))
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: order.append(f"after {n}"))
    module(x).sum().backward()
    assert len(order) == len(set(order)) == 2 * 32
    place = {n: order.index(f"after layers.{n}.weight") for n in (0, 7, 15)}
    assert place[15] < place[7] < place[0]


def test_gradients_leave_before_the_backward_is_over() -> None:
    events: list[str] = []
    model, x = Tower(width=512, depth=6), torch.randn(64, 512)
    module = tightest(model, x)
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(lambda p: events.append("gradient"))
    with noting_segments(events):
        module(x).sum().backward()
    assert events.index("gradient") < len(events) - 1 - events[::-1].index("segment")


class Residual(nn.Module):
    """The gradient of the sum is added to the product with the first weight, after that weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape."""
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("make", [partial(Tower, depth=6), Residual])
@pytest.mark.parametrize("wrap", [planned, tightest])
def test_an_optimizer_in_the_backward(make: Callable[[], nn.Module], wrap: Callable[..., Any]) -> None:
    """Parameters change as soon as their gradient is there; nothing may read them afterwards."""
    x = torch.randn(64, 16)
    results = []
    for runs in (lambda m, x: m, wrap):
        torch.manual_seed(0)
        model = make()
        run = runs(model, x)

        def update(p: torch.Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.01)
            p.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            run(x).pow(2).mean().backward()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_changed_before_the_backward_is_an_error() -> None:
    model, x = Tower(), torch.randn(8, 16)
    loss = planned(model, x)(x).sum()
    with torch.no_grad():
        model.layers[1].weight.mul_(2)
    with pytest.raises(rkmate.BackwardError, match=r"parameter 'layers\.1\.weight' was changed"):
        loss.backward()


def test_gradients_of_a_functional_call() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    other = {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()}
    found = torch.autograd.grad(torch.func.functional_call(module, other, (x,)).sum(),
                                list(other.values()))
    wanted = torch.autograd.grad(torch.func.functional_call(model, other, (x,)).sum(),
                                 list(other.values()))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_a_functional_call_may_be_the_first() -> None:
    model, x = Tower(), torch.randn(8, 16)
    own = list(model.parameters())
    other = {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()}

    def gradients() -> list[torch.Tensor]:
        doubled = {n: t * 2 for n, t in other.items()}
        out = torch.func.functional_call(model, doubled, (x,))
        return [out, *torch.autograd.grad(out.sum(), list(other.values()))]

    wanted = gradients()
    rkmate.apply(model, budget=1.0)
    for _ in range(2):
        assert all(map(torch.equal, gradients(), wanted))
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
    shown = rkmate.applied(model)
    assert shown is not None
    assert len(shown._plans) == 1


def test_changed_gradient_flags_have_plans_of_their_own() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    first = module.plan
    model.layers[0].requires_grad_(False)
    module(x).sum().backward()
    assert module.plan is not first
    assert model.layers[0].weight.grad is None
    assert model.layers[1].weight.grad is not None
    model.requires_grad_(False)
    assert not module(x).requires_grad          # nothing is kept, and there is nothing to plan
    model.layers[1:].requires_grad_(True)
    model.layers[0].requires_grad_(True)
    assert_same_gradients(model, module, lambda run: run(x).sum())
