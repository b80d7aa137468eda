"""Further scenarios of `field.py`: loops with several backwards or losses that take turns, packed sequences,
and forwards that write to frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from field_scenarios import Block, Scenario, Task
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence


def _blocks(number: int = 4, *others: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)), *others)


def _rows(number: int = 128) -> torch.Tensor:
    return torch.randn(number, 32)


def _adversaries(penalty: float = 0.0) -> Task:
    """A discriminator's step, and the generator's through it. `penalty`: of the discriminator's slope."""
    model, real = nn.ModuleDict({"makes": _blocks(), "judges": _blocks(4, nn.Linear(32, 1))}), _rows()

    def step(m: Any) -> torch.Tensor:
        fake = m["makes"](torch.randn(128, 32))
        loss = F.softplus(-m["judges"](real)).mean() + F.softplus(m["judges"](fake.detach())).mean()
        if penalty:
            mix = torch.lerp(real, fake.detach(), torch.rand(128, 1)).requires_grad_()
            slope, = torch.autograd.grad(m["judges"](mix).sum(), mix, create_graph=True)
            loss = loss + penalty * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return F.softplus(-m["judges"](fake)).mean()
    return Task(model, step)


class Turns(nn.Module):
    """A generator and a discriminator whose one forward takes turns."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = _blocks(), _blocks(4, nn.Linear(32, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the discriminator's loss if it gets real rows, else the generator's; and what was made."""
        fake = self.makes(noise)
        if real is None:
            return F.softplus(-self.judges(fake)).mean(), fake.detach()
        return F.softplus(-self.judges(real)).mean() + F.softplus(
            self.judges(fake.detach())).mean(), fake.detach()


def _turns() -> Task:
    real, noise = _rows(), _rows()

    def step(m: Any) -> torch.Tensor:
        kept = []
        for _ in range(2):
            loss, fake = m(noise.normal_() if not kept else torch.randn(128, 32), real)
            loss.backward()
            kept.append(fake)
        loss, _ = m(torch.randn(128, 32))
        return loss
    return Task(Turns(), step)


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = _blocks(), nn.Linear(32, 8), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of both."""
        x = self.trunk(x)
        return self.left(x), self.right(x)


def _in_turn(model: nn.Module, *losses: Callable[[Any], torch.Tensor]) -> Task:
    numbers, x = count(), _rows()
    return Task(model, lambda m: losses[next(numbers) % len(losses)](m(x)))


def _siamese() -> Task:
    first, second = _rows(), _rows()

    def step(m: Any) -> torch.Tensor:
        one, other = m(first), m(second)
        return -(F.cosine_similarity(one, other.detach()).mean()
                 + F.cosine_similarity(other, one.detach()).mean())
    return Task(_blocks(), step)


class Packed(nn.Module):
    """A recurrent network over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(50, 32), nn.LSTM(32, 32, 2, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 50))

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        """Return logits."""
        found, _ = self.layers(packed._replace(data=self.words(packed.data)))
        out: torch.Tensor = self.head(pad_packed_sequence(found)[0])
        return out


def _packed() -> Task:
    given = pack_sequence([torch.randint(0, 50, (n,)) for n in (20, 17, 12, 9, 9, 5)])
    labels = torch.randint(0, 50, (120,))
    return Task(Packed(), lambda m: F.cross_entropy(m(given).flatten(0, 1), labels))


class Averaging(nn.Module):
    """Moves an average of its weights in each forward, which teaches them."""

    def __init__(self, keys: int = 0) -> None:
        """`keys`: of a queue of negatives; 0: none."""
        super().__init__()
        self.taught = _blocks()
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
    x, y = _rows(64), _rows(64)
    return Task(Averaging(keys), lambda m: m(x, y))


class Scaled(nn.Module):
    """Keeps the size of its results in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.size = _blocks(), nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return results of size one."""
        x = self.layers(x)
        with torch.no_grad():
            self.size.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return x / self.size


def _row(name: str, make: Callable[[], Task], budget: float = 0.6) -> Scenario:
    return Scenario("torch", name, "model", make, budget=budget)


SCENARIOS: tuple[Scenario, ...] = (
    _row("adversaries in one module", _adversaries),
    _row("adversaries, with a penalty", lambda: _adversaries(10.0), 0.8),
    _row("adversaries whose one forward takes turns", _turns),
    _row("losses in turn", lambda: _in_turn(_blocks(), lambda x: x.square().mean(),
                                            lambda x: F.cross_entropy(x, torch.arange(128) % 32))),
    _row("heads in turn", lambda: _in_turn(Heads(), lambda x: x[0].square().mean(),
                                           lambda x: x[1].square().mean())),
    _row("two calls, each a target of the other", _siamese),
    _row("packed sequences", _packed),
    _row("an average of weights inside", _averaging),
    _row("an average of weights inside, a queue", lambda: _averaging(256)),
    _row("a frozen weight that is written", lambda: _in_turn(Scaled(), lambda x: x.square().mean())),
)
