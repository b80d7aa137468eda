"""Copies and pickles of a wrapped module: what was hung on it comes along, as in eager mode."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
import rkmate.dtr
from tests.semantics.steps import Tower, planned

SEEN: list[str] = []


def before(module: nn.Module, args: Any) -> None:
    SEEN.append("before")


def after(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    SEEN.append("after")
    return output * 2


def after_backward(module: nn.Module, into: Any, out: Any) -> None:
    SEEN.append("after backward")


def before_backward(module: nn.Module, out: Any) -> None:
    SEEN.append("before backward")


def renamed(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    state["more"] = torch.ones(1)


def hang_on(module: nn.Module) -> None:
    """Hooks of every kind, and an attribute."""
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, with_kwargs=True)
    module.register_full_backward_hook(after_backward)
    module.register_full_backward_pre_hook(before_backward)
    module.register_state_dict_post_hook(renamed)
    module.tag = ["a tag"]


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def events_of(module: nn.Module, x: torch.Tensor) -> list[str]:
    SEEN.clear()
    module(x).sum().backward()
    return list(SEEN)


WRAPPERS: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "planned": planned, "dynamic": lambda model, x: rkmate.dtr.wrap(model, "1GiB")}
COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "save": saved_and_loaded}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_copy_has_the_hooks(wrapper: str, copied: str) -> None:
    model, x = Tower(depth=2), torch.randn(4, 16, requires_grad=True)
    eager = copy.deepcopy(model)
    module = WRAPPERS[wrapper](model, x)
    for m in (eager, module):
        hang_on(m)
    expected, eager_copy = events_of(eager, x), COPIES[copied](eager)
    assert len(expected) == 4
    assert events_of(module, x) == expected
    other = COPIES[copied](module)
    assert type(other) is type(module)
    assert events_of(other, x) == events_of(eager_copy, x) == expected
    assert torch.equal(other(x), eager_copy(x))
    assert other.state_dict().keys() == eager_copy.state_dict().keys()
    assert other.tag == ["a tag"] and other.tag is not module.tag
    for a, b in zip(other.parameters(), eager_copy.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_hooks_of_a_copy_are_its_own() -> None:
    model, x = Tower(depth=2), torch.randn(4, 16)
    module = planned(model, x)
    handle = module.register_forward_pre_hook(before)
    other = copy.deepcopy(module)
    handle.remove()
    other.register_forward_hook(after, with_kwargs=True)
    assert events_of(module, x) == []
    assert events_of(other, x) == ["before", "after"]


def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a library puts in the place of `forward`: it calls the one before."""
    return 2 * module._forward_before(x)


@pytest.mark.filterwarnings("ignore:a library has put its own forward")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_copy_has_the_forward_that_a_library_put_there(wrapper: str) -> None:
    model, x = Tower(depth=2), torch.randn(4, 16)
    module = WRAPPERS[wrapper](model, x)
    module._forward_before = module.forward
    module.forward = MethodType(doubled, module)
    other = copy.deepcopy(module)
    assert torch.equal(other(x), 2 * model(x))
    with torch.no_grad():
        next(iter(module.parameters())).zero_()
    assert not torch.equal(other(x), module(x))                 # it runs on its own parameters
    assert not hasattr(module.original, "_forward_before")


def test_the_originals_forward_in_the_place_of_the_planned_one_is_warned_of() -> None:
    model, x = Tower(depth=2), torch.randn(4, 16)
    module = planned(model, x)
    with pytest.warns(rkmate.RkmateWarning, match="a method of the wrapped Tower: .* without a plan"):
        module.forward = model.forward
    assert torch.equal(module(x), model(x))


def test_a_module_that_refers_to_the_wrapper() -> None:
    model, x = Tower(depth=2), torch.randn(4, 16)
    module = planned(model, x)
    module.callbacks = [module.train]
    other = copy.deepcopy(module)
    assert other.callbacks[0].__self__ is other
    other(x).sum().backward()
    assert model.layers[0].weight.grad is None
