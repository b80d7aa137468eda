"""``gradients="in_place"``: what is refused, when, and what a failed backward leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rkmate
from rkmate.runtime.segments import Call
from tests.semantics.in_place import X, assert_grads, tower, wrapped
from tests.semantics.steps import Tower, planned, tightest


def sparse(model: nn.Sequential) -> None:
    model[0].weight.grad = torch.zeros(16, 16).to_sparse()


def of_other_strides(model: nn.Sequential) -> None:
    model[0].weight.grad = torch.zeros(16, 16).t()


REFUSED: dict[Callable[[nn.Sequential], Any], str] = {
    lambda m: m[0].weight.register_hook(lambda g: g): "'0.weight' has a gradient hook",
    lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None): "runs after its gradient",
    sparse: "a gradient of the layout torch.sparse", of_other_strides: "gradient of another form"}


def test_what_is_refused_at_every_moment() -> None:
    """When the module is wrapped, before a forward, and before a backward adds anything."""
    model, module = wrapped()
    for change, message in REFUSED.items():
        loss = module(X).sum()
        handle = change(model)
        with pytest.raises(rkmate.ArgumentError, match=message):
            planned(model, X, gradients="in_place")
        with pytest.raises(rkmate.ArgumentError, match=message):
            module(X)
        with pytest.raises(rkmate.BackwardError, match=message):
            loss.backward()
        assert all(p.grad is None for n, p in model.named_parameters() if n != "0.weight")
        model.zero_grad()
        if handle is not None:
            handle.remove()


def test_gradients_that_are_asked_for_as_tensors() -> None:
    model, module = wrapped()
    x = X.clone().requires_grad_()
    other = planned(tower(), x, gradients="in_place")
    first = [*model.parameters()][:1]
    for ask in (lambda: torch.autograd.grad(module(X).sum(), list(model.parameters())),
                lambda: torch.autograd.grad(module(X).sum(), first),
                lambda: module(X).sum().backward(inputs=first),
                lambda: torch.autograd.grad(other(x).sum(), x)):
        with pytest.raises(rkmate.BackwardError, match="does not add to the gradient of"):
            ask()
    with pytest.raises(rkmate.BackwardError, match="double backward"):
        module(X).sum().backward(create_graph=True)
    assert all(p.grad is None for p in (*model.parameters(), *other.parameters()))
    plain = tower()
    plain(X).sum().backward()
    module(X).sum().backward(inputs=list(model.parameters()))      # which is all of them
    assert_grads(plain, model)


def test_a_refused_backward_can_be_called_as_it_should_be() -> None:
    (model, module), plain = wrapped(), tower()
    loss = module(X).sum()
    with pytest.raises(rkmate.BackwardError):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    plain(X).sum().backward()
    assert_grads(plain, model)


def test_a_parameter_that_is_none_of_its_own() -> None:
    model, module = wrapped()
    other = {n: p.detach().clone().requires_grad_() * 1 for n, p in model.named_parameters()}
    with pytest.raises(rkmate.ArgumentError, match="is computed from other tensors"):
        torch.func.functional_call(module, other, (X,))
    loss = module(X).sum()
    model[0].weight.requires_grad_(False)
    with pytest.raises(rkmate.BackwardError, match=r"does not add to the gradient of '0\.weight'"):
        loss.backward()


def test_steps_of_several_calls_are_not_measured() -> None:
    """Measuring takes hooks, which gradients in place refuse."""
    model = tower()
    module = planned(model, X, gradients="in_place", calls=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (module(X).sum() + module(2 * X).sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def test_replicas_are_refused() -> None:
    model, module = wrapped()
    with mock.patch.object(DistributedDataParallel, "_active_ddp_module", model), \
            pytest.raises(rkmate.ArgumentError, match="exchanges gradients"):
        module(X)
    inside = nn.Sequential(nn.DataParallel(nn.Linear(16, 16)))
    with pytest.raises(rkmate.ArgumentError, match="DataParallel exchanges gradients"):
        planned(inside, X, gradients="in_place")


# -- a backward that fails ----------------------------------------------------------------


def test_a_failed_backward_is_remembered() -> None:
    """What it has added stays, and the next step refuses to add to it."""
    torch.manual_seed(0)
    model, plain = Tower(depth=6), Tower(depth=6)
    plain.load_state_dict(model.state_dict())
    module = tightest(model, X, gradients="in_place")
    count = len(module.plan.blocks)
    assert count > 1
    seen: list[int] = []
    run = Call.run

    def failing(call: Call, number: int) -> Any:
        seen.append(number)
        if number == count - 1:
            call.functions = [*call.functions[:-1], _fails]
        return run(call, number)

    plain(X).sum().backward()
    ways = (model.zero_grad, lambda: model.zero_grad(set_to_none=False),
            lambda: [p.grad.data.zero_() for p in model.parameters() if p.grad is not None])
    for zero in ways:
        with mock.patch.object(Call, "run", failing), pytest.raises(RuntimeError, match="out of luck"):
            module(X).sum().backward()
        assert any(p.grad is not None for p in model.parameters())
        for write in (lambda: None, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)):
            write()
            with pytest.raises(rkmate.ArgumentError, match=r"a backward failed.*zero_grad"):
                module(X)
        zero()
        module(X).sum().backward()
        assert_grads(plain, model)
        model.zero_grad()
    assert len(seen) == 3 * count


def _fails(env: Any) -> list[Any]:
    raise RuntimeError("out of luck")
