"""Scenarios of `field.py`: values that a forward checks, keeps and counts."""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.base import Scenario, Task, batch, blocks, plain, squared


class Computing(nn.Module):
    """Layers, and something that is computed of their result."""

    def __init__(self, then: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layers, self.mean, self.spread = blocks(), nn.Linear(32, 8), nn.Linear(32, 8)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        """Return what is computed."""
        return self.then(self, self.layers(x))


def _likely(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(m.mean(x), torch.ones(len(x), 8), F.softplus(m.spread(x)))


def _checked(m: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.any(x.abs() > 1e4):
        raise FloatingPointError(f"diverged: {x.abs().max()}")
    assert x.min() > -1e4
    return x


def _distributed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return -torch.distributions.Normal(m.mean(x), F.softplus(m.spread(x)), validate_args=True).log_prob(
        torch.ones(len(x), 8)).mean()


def _logged(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = m.mean(x).square().mean()
    m.last = loss.item()
    return loss, {"loss": m.last, "largest": x.abs().max().item()}


def _logs() -> Task:
    x, model = batch(), Computing(_logged, last=0.0)

    def train(m: Any) -> list[float]:
        optimizer, left = torch.optim.SGD(m.parameters(), 0.05), []
        for _ in range(4):
            optimizer.zero_grad()
            loss, logs = m(x)
            loss.backward()
            optimizer.step()
            left += [loss.item(), m.last, *logs.values()]
        return left
    return Task(model, lambda m: m(x)[0], train=train)


def _endless() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 0.9


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.counter["calls"] += 1
    return x / m.counter["calls"]


def _computing(name: str, then: Callable[[Any, torch.Tensor], Any],
               make: Callable[[], dict[str, Any]] = dict) -> Scenario:
    return plain(name, lambda: squared(Computing(then, **make())))


class Averaging(nn.Module):
    """Moves an average of its weights in each forward, which teaches them."""

    def __init__(self, keys: int = 0) -> None:
        """`keys`: of a queue of negatives; 0: none."""
        super().__init__()
        self.taught = blocks()
        self.average = copy.deepcopy(self.taught).requires_grad_(False)
        self.keys = keys
        self.register_buffer("queue", F.normalize(torch.randn(32, max(1, keys)), dim=0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        with torch.no_grad():
            for new, old in zip(self.taught.parameters(), self.average.parameters(), strict=True):
                old.mul_(0.99).add_(new, alpha=0.01)
            target = self.average(y)
        if not self.keys:
            return F.mse_loss(self.taught(x), target)
        found, target = F.normalize(self.taught(x), dim=1), F.normalize(target, dim=1)
        logits = torch.cat([(found * target).sum(1, keepdim=True), found @ self.queue.clone()], 1) / 0.07
        self.queue = torch.cat([target.T, self.queue[:, :-len(target)]], 1)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def _averaging(keys: int = 0) -> Task:
    x, y = batch(64), batch(64)
    return Task(Averaging(keys), lambda m: m(x, y))


class Scaled(nn.Module):
    """Keeps the size of its results in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.size = blocks(), nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return results of size one."""
        x = self.layers(x)
        with torch.no_grad():
            self.size.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return x / self.size


def _through_time() -> Task:
    """A recurrent state that goes from step to step, detached."""
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(32, 64, 2, batch_first=True), blocks(2)
            self.out = nn.Linear(64, 32)

        def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
            x, state = self.layer(x, state)
            return self.head(self.out(x)), state

    x, kept = torch.randn(8, 16, 32), [None]

    def step(m: Any) -> torch.Tensor:
        out, state = m(x, kept[0])
        kept[0] = tuple(s.detach() for s in state)
        return F.mse_loss(out, x.flip(1))
    return Task(Recurrent(), step)


def _scheduled() -> Task:
    """A number of the class, and one around the forward, that a schedule changes."""
    factor = 1.0

    class Heated(nn.Module):
        warmth = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x) * type(self).warmth * factor
            return out

    x, numbers = batch(), itertools.count()

    def step(m: Any) -> torch.Tensor:
        nonlocal factor
        Heated.warmth = 1.5 if next(numbers) > 1 else 1.0
        factor = 2.0 - Heated.warmth / 2
        return m(x).square().mean()
    return Task(Heated(), step)


SCENARIOS: tuple[Scenario, ...] = (
    _computing("a gaussian likelihood", _likely),
    _computing("checks that raise", _checked),
    _computing("a distribution that validates", _distributed),
    plain("numbers of a loss, returned and kept", _logs),
    _computing("a count that advances", lambda m, x: x / next(m.numbers), lambda: {
        "numbers": itertools.count(1)}),
    _computing("a generator that advances", lambda m, x: x * next(m.numbers), lambda: {
        "numbers": _endless()}),
    _computing("a counter", _counted, lambda: {"counter": collections.Counter()}),
    plain("numbers of a class and around it", _scheduled, 0.7),
    plain("an average of weights inside", _averaging),
    plain("an average of weights inside, a queue", lambda: _averaging(256)),
    plain("a frozen weight that is written", lambda: Task(
        Scaled(), lambda m, x=batch(): m(x).square().mean())),
    plain("a state through time", _through_time, 0.7),
)
