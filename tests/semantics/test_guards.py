"""What is changed in a module after it was wrapped: each call follows the module as it is then."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import rkmate
from rkmate.runtime import plan_cache
from rkmate.runtime.guards import ModuleReader, guards_of
from tests.semantics.steps import Tower, assert_same_gradients, planned


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _agree(model: nn.Module, module: rkmate.PlannedModule, *args: Any, plans: int) -> None:
    assert torch.equal(module(*args), model(*args))
    assert_same_gradients(model, module, lambda run: run(*args).pow(2).sum())
    assert len(module._plans) == plans


# -- submodules, forwards, hooks ----------------------------------------------------------


def test_replaced_submodules(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _net(), torch.randn(4, 8)
    module, first = planned(model, x), model[2]
    with caplog.at_level(logging.WARNING, logger="rkmate"):
        model[1], model[2] = nn.Tanh(), nn.Linear(8, 8)
        _agree(model, module, x, plans=2)
        model[2] = nn.Linear(8, 8)
        _agree(model, module, x, plans=3)
        model[1], model[2] = nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), first
        _agree(model, module, x, plans=4)
    assert len([r for r in caplog.records if "a plan is made" in r.message]) == 1


def test_parts_that_change_places_and_come_back() -> None:
    model, x = _net(), torch.randn(4, 8)
    module = planned(model, x)
    for plans in (2, 2, 2):
        model[0], model[2] = model[2], model[0]
        _agree(model, module, x, plans=plans)


def test_what_cannot_be_planned_is_refused_in_a_new_part() -> None:
    model, x = _net(), torch.randn(4, 8)
    module = planned(model, x)
    model[1] = nn.Tanh()
    model[1].register_full_backward_hook(lambda *a: None)
    with pytest.raises(rkmate.CaptureError, match="module backward hooks"):
        module(x)


def test_other_hooks() -> None:
    model, x = _net(), torch.randn(4, 8)
    handle = model[0].register_forward_hook(lambda m, a, y: y * 2)
    with pytest.warns(rkmate.RkmateWarning, match="forward hooks"):
        module = planned(model, x)
    handle.remove()
    model[0].register_forward_hook(lambda m, a, y: y * 3)
    _agree(model, module, x, plans=2)


class Doubles(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2

    def thrice(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def test_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Doubles(8, 8), nn.Tanh()), torch.randn(4, 8)
    module = planned(model, x)
    for _ in range(2):
        model[0].forward = model[0].thrice        # a new method object each time
        _agree(model, module, x, plans=2)
    model[0].forward = MethodType(Doubles.forward, model[0])
    _agree(model, module, x, plans=2)
    del model[0].forward
    _agree(model, module, x, plans=2)
    monkeypatch.setattr(Doubles, "forward", lambda m, x: F.linear(x, m.weight) * 5)
    _agree(model, module, x, plans=3)


def test_another_class() -> None:
    model, x = nn.Sequential(Doubles(8, 8), nn.Tanh()), torch.randn(4, 8)
    module = planned(model, x)
    model[0].__class__ = nn.Linear
    _agree(model, module, x, plans=2)


# -- parameters and buffers ---------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(i)))


def test_untied_and_tied_again() -> None:
    model, i = Tied(), torch.randint(0, 11, (3, 5))
    module = planned(model, i)
    model.head.weight = nn.Parameter(torch.randn(11, 8))
    _agree(model, module, i, plans=2)
    model.head.weight = model.embed.weight
    _agree(model, module, i, plans=2)
    model.load_state_dict({k: torch.randn(11, 8) for k in model.state_dict()}, assign=True)
    assert model.head.weight is not model.embed.weight
    _agree(model, module, i, plans=2)


def test_new_parameters_of_the_same_kind_are_no_other_call() -> None:
    model, x = _net(), torch.randn(4, 8)
    module = planned(model, x)
    model.load_state_dict(_net().state_dict(), assign=True)
    _agree(model, module, x, plans=1)


def test_strides_of_parameters() -> None:
    model, x = _net(), torch.randn(4, 8)
    module = planned(model, x)
    model[0].weight.data = torch.randn(8, 8).t()
    _agree(model, module, x, plans=2)


def test_autocast_of_the_parameters_device() -> None:
    """Also where no input stands on it: only the signature is made here, which needs no such device."""
    model, x = nn.Module(), torch.randn(4, 8)
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
    reader = ModuleReader(model)
    before = torch.is_autocast_enabled("cuda")
    try:
        keys = []
        for enabled in (False, True):
            torch.set_autocast_enabled("cuda", enabled)
            keys.append(guards_of(reader, (x,), {})[0])
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert keys[0] != keys[1]


@pytest.mark.gpu
def test_autocast_where_the_inputs_stand_elsewhere() -> None:
    class Moves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.weight.device))

    model, x = Moves(8, 8, device="cuda"), torch.randn(4, 8)
    module = planned(model, x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert module(x).dtype is torch.bfloat16
    assert module(x).dtype is torch.float32
    assert len(module._plans) == 2


class Attention(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return F.scaled_dot_product_attention(y, y, y)


def test_the_kernels_that_may_be_chosen() -> None:
    """A plan that was made where attention is to be computed by products is none for outside of that."""
    model, x = Attention(8, 8), torch.randn(2, 2, 4, 8)
    with sdpa_kernel(SDPBackend.MATH):
        module = planned(model, x)
        assert "scaled_dot_product" not in module.source
        _agree(model, module, x, plans=1)
    _agree(model, module, x, plans=2)
    assert "scaled_dot_product" in module.source
    with torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled):
        _agree(model, module, x, plans=3)


# -- plain attributes ---------------------------------------------------------------------


class Scaled(nn.Linear):
    def __init__(self, scale: Any) -> None:
        super().__init__(8, 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, scale = super().forward(x), self.scale
        if isinstance(scale, SimpleNamespace):
            scale = scale.value
        if isinstance(scale, tuple):
            scale = scale[0]
        if isinstance(scale, list):
            scale = float(scale[0])
        if scale is None:
            return y
        if isinstance(scale, torch.Tensor):
            scale = scale.shape[0]
        return scale(y) if callable(scale) else y * scale


@pytest.mark.parametrize("make", [
    torch.zeros,
    lambda n: SimpleNamespace(value=torch.zeros(n)),
    lambda n: (torch.zeros(n), 1.0),
    lambda n: partial(torch.mul, other=float(n)),
    lambda n: lambda y: y * n,
], ids=["tensor", "in an object", "in a tuple", "partial", "function"])
def test_another_object_in_an_attribute(make: Callable[[int], Any]) -> None:
    first, second = make(2), make(3)
    model, x = Scaled(first), torch.randn(4, 8)
    module = planned(model, x)
    model.scale = second
    _agree(model, module, x, plans=2)
    model.scale = first
    _agree(model, module, x, plans=2)


def test_values_of_a_tensor_in_an_attribute() -> None:
    class Multiplied(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) * self.scale

    model, x = Multiplied(torch.ones(8)), torch.randn(4, 8)
    module = planned(model, x)
    model.scale = torch.randn(8)
    _agree(model, module, x, plans=2)
    model.scale.mul_(3)
    _agree(model, module, x, plans=2)


@pytest.mark.parametrize("make", [list, lambda ts: dict(enumerate(ts))], ids=["list", "dictionary"])
def test_other_tensors_in_a_list(make: Callable[[list[torch.Tensor]], Any]) -> None:
    class Multiplied(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) * self.scale[0] + self.scale[1]

    first, second = torch.randn(8), torch.randn(8)
    model, x = nn.Sequential(Multiplied(make([first, torch.ones(8)]))), torch.randn(4, 8)
    module = planned(model, x)
    model[0].scale[0] = second
    _agree(model, module, x, plans=2)
    second.mul_(3)
    _agree(model, module, x, plans=2)
    model[0].scale[0] = first
    _agree(model, module, x, plans=2)
    model[0].scale = make([second, first])
    _agree(model, module, x, plans=3)


FACTOR, FACTORS, CHOSEN = 1.0, {"of": [1.0]}, Namespace(factor=1.0)


def _factor() -> Any:
    return FACTOR * FACTORS["of"][0] * CHOSEN.factor                                # type: ignore[index]


numbers = 0.0
"""A global variable of the name of an attribute, like those of a loop in a script."""


class Chosen:
    """Holds numbers."""

    factor, of = 1.0, Namespace(factor=1.0)


def _scaled(by: float, config: Any) -> tuple[Callable[[Any], Any], Callable[[float], None]]:
    """A decorator and a function of numbers around them, and what changes the first number."""
    def decorated(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(*args: Any) -> Any:
            return forward(*args) * by * config["of"][0]
        return run

    def change(number: float) -> None:
        nonlocal by
        by = number
    return decorated, change


CONFIG = {"of": [1.0]}
decorated, change_inside = _scaled(1.0, CONFIG)
times, change_of_attribute = _scaled(1.0, CONFIG)
hooked, change_of_hook = _scaled(1.0, CONFIG)


class Multiplying(nn.Linear):
    """Reads numbers from everywhere."""

    of_class, steps = 1.0, 0

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.times = times(lambda x: x)
        hook = hooked(lambda x: x)
        self.register_forward_hook(lambda module, args, out: hook(out))
        self.numbers, self.inner, self.config = [1.0, 2.0], {"a": {"b": 1.0}}, SimpleNamespace(of={"a": 1.0})
        self.unread = [0.0]

    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = self.numbers[0] * self.inner["a"]["b"] * self.config.of["a"] * _factor()
        Multiplying.steps += 1              # what the forward assigns itself is not compared
        return self.times(super().forward(x) * by * self.of_class * Chosen.factor * Chosen.of.factor)


WAYS: dict[str, Callable[[Any, float], object]] = {
    "list": lambda m, n: m.numbers.__setitem__(0, n),
    "nested dictionary": lambda m, n: m.inner["a"].update(b=n),
    "in an object": lambda m, n: m.config.of.update(a=n),
    "global variable": lambda m, n: globals().update(FACTOR=n),
    "global dictionary": lambda m, n: FACTORS["of"].__setitem__(0, n),              # type: ignore[index]
    "global object": lambda m, n: setattr(CHOSEN, "factor", n),
    "class": lambda m, n: setattr(Multiplying, "of_class", n),
    "another class": lambda m, n: setattr(Chosen, "factor", n),
    "an object of a class": lambda m, n: setattr(Chosen.of, "factor", n),
    "around a decorated forward": lambda m, n: change_inside(n),
    "a list around it": lambda m, n: CONFIG["of"].__setitem__(0, n),
    "around a function in an attribute": lambda m, n: change_of_attribute(n),
    "around a function of a hook": lambda m, n: change_of_hook(n),
}


@pytest.mark.filterwarnings("ignore:Multiplying has forward hooks")
def test_numbers_that_a_forward_reads_are_compared() -> None:
    model, x = Multiplying(), torch.randn(4, 8)
    module = planned(model, x)
    for plans, change in enumerate(WAYS.values(), 2):
        try:
            for number in (1.5, 1.0, 1.5):
                change(model, number)
                model.unread.append(number)             # history that callbacks write, say
                globals()["STEP"] = number
                globals()["numbers"] += 1.0
                _agree(model, module, x, plans=plans)
        finally:
            change(model, 1.0)


def test_a_layers_own_list_of_its_parameters() -> None:
    """A recurrent layer keeps one; another weight of the same shape is no other call."""
    model, x = nn.GRU(8, 8), torch.randn(3, 4, 8)
    module = planned(model, x)
    model.weight_hh_l0 = nn.Parameter(torch.randn(24, 8))
    assert_same_gradients(model, module, lambda run: sum(t.pow(2).sum() for t in run(x)))
    assert len(module._plans) == 1


def test_what_differs_is_named() -> None:
    model, x = nn.Sequential(Scaled(2.0), nn.Linear(8, 8)), torch.randn(4, 8)
    module = planned(model, x, on_new_shape="error")

    def refused(match: str) -> None:
        with pytest.raises(rkmate.ArgumentError, match=match):
            module(x)

    model[0].scale = 3.0
    refused("in the values of 0.scale; and on_new_shape")
    model[0].scale = 2.0
    hook = model[1].register_forward_hook(lambda m, args, out: out * 2)
    model[1].register_forward_pre_hook(lambda m, args: None)
    refused("number of hooks")
    hook.remove()
    model[1]._forward_pre_hooks.clear()
    weight = model[1].weight
    model[1].weight = model[0].weight
    refused("which of them are tied; and")
    model[1].weight = weight
    model[1] = nn.Linear(8, 8, bias=False)
    refused("in its submodules")


@pytest.mark.parametrize("make", [lambda n: SimpleNamespace(value=n), lambda n: [str(n)]],
                         ids=["object", "list of texts"])
def test_an_equal_object_in_an_attribute_is_no_other_call(make: Callable[[float], Any]) -> None:
    class WithDefault(Scaled):
        scale: Any = None       # lists are compared in attributes that have a plain default

    model, x = WithDefault(make(2.0)), torch.randn(4, 8)
    module = planned(model, x)
    model.scale = make(2.0)
    _agree(model, module, x, plans=1)
    model.scale = make(3.0)
    _agree(model, module, x, plans=2)
    model.scale = make(2.0)
    _agree(model, module, x, plans=2)


def test_a_changed_object_in_an_attribute_is_another_call() -> None:
    model, x = Scaled(SimpleNamespace(value=2.0)), torch.randn(4, 8)
    module = planned(model, x)
    model.scale.value = 3.0
    _agree(model, module, x, plans=2)


def test_a_new_tensor_in_every_step() -> None:
    """Each is another call, also where it lies at the address of one that is gone."""
    model, x = nn.Sequential(Scaled(None), nn.Tanh()), torch.randn(4, 8)
    module = planned(model, x)

    def step(k: int) -> None:
        model[0].scale = None
        gc.collect()
        model[0].scale = torch.zeros(k)
        assert torch.equal(module(x), model(x))

    step(1)
    step(2)
    with pytest.warns(rkmate.RkmateWarning, match=r"Sequential: 0\.scale changed .*register_buffer"):
        step(3)
    for k in range(4, 8):                      # said once
        step(k)
    assert len(module._plans) == 8


class Shifts:
    def shifted(self, y: torch.Tensor) -> torch.Tensor:
        return y + 1


@pytest.mark.filterwarnings("ignore:.* an argument that is no tensor changed")
def test_functions_as_arguments_are_not_taken_for_those_that_are_gone() -> None:
    class Applies(nn.Linear):
        def forward(self, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            return f(super().forward(x))

    model, x = Applies(8, 8), torch.randn(4, 8)
    module = planned(model, x, torch.tanh)
    for k in range(1, 6):
        function = lambda y, k=k: y * k      # noqa: E731
        assert torch.equal(module(x, function), model(x, function))
        del function
        gc.collect()
    before, holder = len(module._plans), Shifts()
    for _ in range(3):
        module(x, holder.shifted)           # a new method object each time
    assert len(module._plans) == before + 1


# -- copies, and what a call costs --------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "pickle"])
def test_copies_follow_the_saved_plans(copied: Callable[[Any], Any],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    model, i = Tied(), torch.randint(0, 11, (3, 5))
    module = planned(model, i)
    model.head.weight = nn.Parameter(torch.randn(11, 8))
    module(i)
    model.head.weight = model.embed.weight
    other = copied(module)
    monkeypatch.setattr(plan_cache, "make_plan",
                        lambda *a: pytest.fail("searched for a plan that was saved"))
    _agree(other.original, other, i, plans=1)
    other.original.head.weight = nn.Parameter(torch.randn(11, 8))
    _agree(other.original, other, i, plans=2)


def test_what_has_not_changed_is_not_compared_again() -> None:
    model, x = Tower(), torch.randn(4, 16)
    reader = ModuleReader(model)
    first, _ = guards_of(reader, (x,), {})
    second, _ = guards_of(reader, (x,), {})
    assert first == second and hash(first) == hash(second)
    for name in ("attributes", "places"):
        assert getattr(first, name) is getattr(second, name)
    assert first.flags.parts is second.flags.parts
    assert first.flags.flags is second.flags.flags
    other, _ = guards_of(ModuleReader(model), (x,), {})
    assert first == other and hash(first) == hash(other)
