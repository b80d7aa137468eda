"""Parts whose later calls have other outputs, or whose arguments are one tensor."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.options import options_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Appending(Layer):
    """Appends a tensor to a list."""

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        hidden = F.gelu(self.up(x))
        kept.append(hidden.square().mean())
        out: torch.Tensor = self.down(hidden)
        return out


class Sometimes(Layer):
    """Returns a second tensor for long inputs."""

    def forward(self, x: torch.Tensor, kept: Any) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return (out, out.mean()) if len(x) > 20 else out


class Reading(Layer):
    """Reads two tensors, which may be one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * y + x + y


class Stack(nn.Module):
    """Looks at values between its layers."""

    def __init__(self, kind: Callable[[], nn.Module], call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(kind() for _ in range(3)), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for layer in self.layers:
            x = self.call(layer, x, kept)
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        return torch.stack([x.square().mean(), *kept]).sum()


def _with_list(layer: nn.Module, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    found = layer(x, kept)
    if isinstance(found, tuple):
        kept.append(found[1])
        found = found[0]
    return x + found


def _twice(layer: nn.Module, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = layer(x, x)
    return found


def _twice_and_once(layer: nn.Module, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    x = torch.tanh(x)
    found: torch.Tensor = layer(x, x) - x
    return found


def _same_steps(model: nn.Module, lengths: Sequence[int]) -> None:
    """Train a model by parts as it trains without rkmate."""
    plain = copy.deepcopy(model)
    rkmate.apply(model, budget=0.8, **options_of(costs="analytic", tiles="never", progress=False))
    for length in lengths:
        x, found = torch.randn(length, 16), []
        for m in (plain, model):
            m.zero_grad()
            loss = m(x)
            loss.backward()
            found.append([loss, *(p.grad for p in m.parameters())])
        assert all(one is two is None or torch.equal(one, two) for one, two in zip(*found, strict=True))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "appends": (Appending, _with_list), "returns less": (Sometimes, _with_list),
    "one tensor twice": (Reading, _twice), "one tensor twice, and elsewhere": (Reading, _twice_and_once)}


@pytest.mark.parametrize("case", CASES)
def test_calls_that_differ(case: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Stack(*CASES[case])
    with caplog.at_level(logging.WARNING, "rkmate"):
        _same_steps(model, (64, 64, 48, 16, 64, 16))
    assert "is planned by parts: layers.0 to layers.2, 3 in all" in caplog.text


class Slope(Layer):
    """Adds the slope of a function of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope: torch.Tensor = torch.func.grad(lambda t: super(Slope, self).forward(t).square().sum())(x)
        return super().forward(x) + slope


class Direction(Layer):
    """Takes a derivative in forward mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, found = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return torch.tanh(x) + found


def _once(layer: nn.Module, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = layer(x)
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is")
@pytest.mark.parametrize("kind", [Slope, Direction])
def test_transforms_of_torch_func(kind: Callable[[], nn.Module]) -> None:
    """They run in the step that is observed, with hooks on saved tensors, and after a refused capture."""
    torch.manual_seed(0)
    _same_steps(Stack(kind, _once), (64, 64, 64))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is")
def test_a_refused_capture_leaves_forward_mode() -> None:
    with pytest.raises(rkmate.CaptureError, match="amax"):
        rkmate.wrap(Stack(Direction, _once), (torch.randn(8, 16),), budget=1.0, progress=False)
    torch.func.jvp(torch.sin, (torch.ones(3),), (torch.ones(3),))


class Adversarial(nn.Module):
    """Makes two steps in its forward, and freezes what each does not train, as Lightning does."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judged = (nn.Sequential(*(Layer() for _ in range(3))) for _ in range(2))
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (self.made, self.judged)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, optimizer in enumerate(self.optimizers):
            parameters = self.optimizers[1 - k].param_groups[0]["params"]
            trained = [p.requires_grad for p in parameters]
            for p in parameters:
                p.requires_grad = False
            loss = self.judged(self.made(x)).square().mean() * (-1) ** k
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, flag in zip(parameters, trained, strict=True):
                p.requires_grad = flag
        return loss.detach()


def test_a_forward_that_makes_whole_steps(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Adversarial()
    plain, inputs = copy.deepcopy(model), [torch.randn(64, 16) for _ in range(4)]
    rkmate.apply(model, budget=0.8, **options_of(costs="analytic", progress=False))
    with caplog.at_level(logging.WARNING, "rkmate"):
        for x in inputs:
            assert torch.equal(model(x), plain(x))
    assert all(p.requires_grad for p in model.parameters())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert "sets requires_grad of a parameter of shape (64, 16)" in caplog.text
    assert caplog.text.count("is planned by parts: made") == 1
