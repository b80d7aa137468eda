"""A walk that is known to come by the same: whatever else would be planned anew is told from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rkmate.runtime import snapshot as unchanged
from rkmate.runtime.snapshot import Walk, attributes_of, counts_assignments, snapshot


class Plain:
    """An object of a class written in Python, unlike a `SimpleNamespace`."""

    def __init__(self) -> None:
        self.depth = 2


class Net(nn.Module):
    """Two layers of which one is inside another module, and an attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Plain()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.linear = nn.Linear(4, 4)
        self.scale, self.settings = 2.0, SimpleNamespace(width=3)
        self.tensors = [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.inner(x)) * self.scale


def walk(net: Net) -> Walk:
    """As a reader of guards makes one."""
    return Walk([*net.modules()], snapshot(attributes_of(net)))


def _hook(*args: object) -> None:
    return None


def _moved(net: Net) -> None:
    net.linear.weight.data = net.linear.weight.data.double()


def _turned(net: Net) -> None:
    net.linear.weight.data = net.linear.weight.data.t()


def _without_gradient(net: Net) -> None:
    net.linear.bias.requires_grad_(False)


def _another_class(net: Net) -> None:
    net.inner[2].__class__ = nn.ReLU6


def _another_dictionary(net: Net) -> None:
    net.linear.__dict__ = {**net.linear.__dict__}


def _other_hooks(net: Net) -> None:
    net.linear._forward_hooks = OrderedDict({0: _hook})


CHANGES: dict[str, Callable[[Net], object]] = {
    "parameter": lambda net: setattr(net.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "no parameter": lambda net: setattr(net.linear, "bias", None),
    "dtype": _moved, "strides": _turned, "gradient": _without_gradient,
    "buffer": lambda net: net.linear.register_buffer("extra", torch.ones(1)),
    "submodule": lambda net: net.inner.append(nn.ReLU()),
    "another submodule": lambda net: net.inner.__setitem__(2, nn.ReLU()),
    "mode": lambda net: net.inner[1].eval(),
    "attribute": lambda net: setattr(net, "scale", 3.0),
    "attribute of another type": lambda net: setattr(net, "scale", 2),
    "new attribute": lambda net: setattr(net.linear, "forward", _hook),
    "settings": lambda net: setattr(net.settings, "width", 4),
    "an object's attribute": lambda net: setattr(net.plain, "depth", 3),
    "members of a list": lambda net: net.tensors.append(torch.ones(2)),
    "forward hook": lambda net: net.linear.register_forward_hook(_hook),
    "hook before": lambda net: net.inner[0].register_forward_pre_hook(_hook),
    "backward hook": lambda net: net.linear.register_full_backward_hook(_hook),
    "hooks replaced": _other_hooks, "class": _another_class, "dictionary": _another_dictionary,
}


COUNTED = [pytest.param(True, id="counted", marks=pytest.mark.skipif(
    not counts_assignments(), reason="this Python does not count assignments to attributes")),
    pytest.param(False, id="compared")]


@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Python counts assignments to attributes or the attributes are compared."""
    monkeypatch.setattr(unchanged, "_COUNTED", counted)
    net = Net()
    found = walk(net)
    assert found.is_now() and found.is_now()
    CHANGES[change](net)
    assert not found.is_now()
    assert walk(net).is_now()


def test_what_classes_and_the_process_have(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    found = walk(net)
    handle = nn.modules.module.register_module_forward_hook(_hook)
    assert not found.is_now()
    handle.remove()
    assert found.is_now()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert not found.is_now()


@pytest.mark.parametrize("counted", COUNTED)
def test_training_is_no_change(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "_COUNTED", counted)
    net = Net()
    found = walk(net)
    net(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.train()
    net.zero_grad()
    assert found.is_now()


def test_what_is_around_a_call_is_no_change_of_the_module() -> None:
    net = Net()
    found = walk(net)
    for around in (torch.autocast("cpu"), torch.no_grad(), torch.inference_mode()):
        with around:
            assert found.is_now() and walk(net).is_now()
    assert found.is_now()


def test_a_module_with_tensors_of_another_kind_is_always_walked_over() -> None:
    net = Net()
    net.rows = nn.Parameter(torch.eye(3).to_sparse())
    assert not walk(net).is_now()
