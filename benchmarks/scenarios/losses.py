"""Scenarios of `field.py`: losses of several calls of a model: contrast, teachers, policies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.base import Scenario, Task, batch, blocks, plain

Loss = Callable[..., torch.Tensor]


def _of_views(loss: Loss, together: bool = False) -> Task:
    """Two views of a batch, each in a call of its own; `together`: in one call."""
    one, other = batch(), batch()
    both = torch.cat([one, other])
    return Task(blocks(6), lambda m: loss(*(m(both).chunk(2) if together else (m(one), m(other)))))


def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """SimCLR's loss."""
    rows = F.normalize(torch.cat([one, other]), dim=1)
    logits = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(one)))


def _supervised(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(torch.cat([one, other]), dim=1)
    alike = (torch.arange(len(rows))[:, None] % 8 == torch.arange(len(rows)) % 8).float().fill_diagonal_(0)
    logits = rows @ rows.T / 0.1
    logits = logits - logits.max(1, keepdim=True)[0].detach()
    others = (logits.exp() * (1 - torch.eye(len(rows)))).sum(1, keepdim=True)
    return -((alike * (logits - others.log())).sum(1) / alike.sum(1)).mean()


def _barlow(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    matrix = one.T @ other / len(one)
    diagonal = torch.diagonal(matrix)
    return (diagonal - 1).square().sum() + 5e-3 * (matrix.square().sum() - diagonal.square().sum())


def _vicreg(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    loss = 25 * F.mse_loss(one, other)
    for rows in (one - one.mean(0), other - other.mean(0)):
        matrix = rows.T @ rows / (len(rows) - 1)
        loss = loss + 25 * F.relu(1 - (rows.var(0) + 1e-4).sqrt()).mean() + (
            matrix.square().sum() - matrix.diagonal().square().sum()) / 32
    return loss


def _assigned(scores: torch.Tensor) -> torch.Tensor:
    found = (scores.detach() / 0.5).exp().T
    for _ in range(3):
        found = found / found.sum(1, keepdim=True)
        found = found / found.sum(0, keepdim=True)
    return found.T


def _swav(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return -((_assigned(one) * F.log_softmax(other / 0.1, 1)).sum(1).mean()
             + (_assigned(other) * F.log_softmax(one / 0.1, 1)).sum(1).mean()) / 2


class Towers(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.scale = blocks(), blocks(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return normalised rows of both, and the scale of logits."""
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1), self.scale.exp()


def _of_towers(loss: Loss) -> Task:
    x, y = batch(), batch()

    def step(m: Any) -> torch.Tensor:
        one, other, scale = m(x, y)
        return loss(scale * one @ other.T)
    return Task(Towers(), step)


def _clip(logits: torch.Tensor) -> torch.Tensor:
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def _siglip(logits: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * (logits - 2)).sum() / len(logits)


def _siamese() -> Task:
    first, second = batch(), batch()

    def step(m: Any) -> torch.Tensor:
        one, other = m(first), m(second)
        return -(F.cosine_similarity(one, other.detach()).mean()
                 + F.cosine_similarity(other, one.detach()).mean())
    return Task(blocks(), step)


def _dropped() -> Task:
    """R-Drop: two calls with other masks, which have to agree."""
    x, y = batch(), torch.randint(0, 10, (128,))

    def step(m: Any) -> torch.Tensor:
        one, other = m(x).log_softmax(-1), m(x).log_softmax(-1)
        return F.nll_loss(one, y) + F.nll_loss(other, y) + (
            F.kl_div(one, other, reduction="batchmean", log_target=True)
            + F.kl_div(other, one, reduction="batchmean", log_target=True)) / 2
    return Task(blocks(4, nn.Linear(32, 10), drop=0.1), step)


def _taught() -> Task:
    teacher, student, x = blocks(), blocks(), batch()

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(m(x), target)
    return Task(student, step)


def _averaged() -> Task:
    """A student next to the moving average of itself."""
    x, student, teacher = batch(64), blocks(), blocks().requires_grad_(False)

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.lerp_(q, 0.1)
            target = teacher(x).softmax(-1)
        return -(target * m(x).log_softmax(-1)).sum(-1).mean()
    return Task(student, step)


def _predicted() -> Task:
    """BYOL: a predictor on a network, whose slow copy is the target."""
    model = nn.ModuleDict({"online": blocks(), "predicts": blocks(1, nn.Linear(32, 32))})
    target = copy.deepcopy(model["online"]).requires_grad_(False)
    one, other = batch(), batch()

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), m["online"].parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            first, second = target(one), target(other)
        return -(F.cosine_similarity(m["predicts"](m["online"](one)), second).mean()
                 + F.cosine_similarity(m["predicts"](m["online"](other)), first).mean())
    return Task(model, step)


class Patches(nn.Module):
    """A small vision transformer without attention, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers, self.head = nn.Conv2d(3, 32, 4, 4), blocks(), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a row for each image."""
        out: torch.Tensor = self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return out


def _crops() -> Task:
    """DINO: large and small crops, in a call for each size, next to a teacher."""
    student = Patches()
    teacher = copy.deepcopy(student).requires_grad_(False)
    large, small, center = torch.randn(8, 3, 32, 32), torch.randn(16, 3, 16, 16), torch.zeros(1, 64)

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(large)
            taught = ((target - center) / 0.04).softmax(-1).chunk(2)
        found = (torch.cat([m(large), m(small)]) / 0.1).log_softmax(-1).chunk(6)
        center.mul_(0.9).add_(target.mean(0, keepdim=True), alpha=0.1)
        losses = [-(t * f).sum(-1).mean() for k, t in enumerate(taught)
                  for n, f in enumerate(found) if n != k]
        return torch.stack(losses).mean()
    return Task(student, step)


class Policy(nn.Module):
    """A policy and a value on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = blocks(), nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of actions, and values."""
        x = self.trunk(x)
        return self.policy(x), self.value(x)[:, 0]


def _proximal() -> Task:
    """PPO: rollouts without gradients, then epochs of minibatches."""
    x, gains = batch(256), torch.randn(256)

    def loss(m: Any, picked: torch.Tensor, before: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        logits, values = m(x[picked])
        actor = torch.distributions.Categorical(logits=logits)
        ratio = (actor.log_prob(actions[picked]) - before[picked]).exp()
        gain = gains[picked] - values.detach()
        return (-torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                + F.mse_loss(values, gains[picked]) / 2 - 0.01 * actor.entropy().mean())

    def train(m: Any) -> list[float]:
        optimizer, found = torch.optim.Adam(m.parameters(), 1e-3), []
        for _ in range(2):
            with torch.no_grad():
                actor = torch.distributions.Categorical(logits=m(x)[0])
                actions = actor.sample()
                before = actor.log_prob(actions)
            for picked in torch.randperm(256).chunk(2):
                optimizer.zero_grad()
                now = loss(m, picked, before, actions)
                now.backward()
                optimizer.step()
                found.append(now.item())
        return found
    picked = torch.arange(128)
    return Task(Policy(), lambda m: loss(m, picked, torch.zeros(256), torch.zeros(256).long()), train=train)


def _clipped_policy() -> Task:
    """PPO: an old policy's probabilities, a value, an entropy."""
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.policy, self.value = blocks(), nn.Linear(32, 6), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.trunk(x)
            return torch.distributions.Categorical(logits=self.policy(x), validate_args=False), self.value(x)

    x, acts, gains = batch(), torch.randint(0, 6, (128,)), torch.randn(128)

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            old = m(x)[0].log_prob(acts)
        chosen, value = m(x)
        ratio = (chosen.log_prob(acts) - old).exp()
        return -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean() + 0.5 * F.mse_loss(
            value[:, 0], gains) - 0.01 * chosen.entropy().mean()
    return Task(ActorCritic(), step)


SCENARIOS: tuple[Scenario, ...] = (
    plain("contrast of two views", lambda: _of_views(contrast)),
    plain("contrast of two views, in one call", lambda: _of_views(contrast, True)),
    plain("contrast within classes", lambda: _of_views(_supervised)),
    plain("redundancy of two views", lambda: _of_views(_barlow)),
    plain("variance and covariance of two views", lambda: _of_views(_vicreg)),
    plain("assignments of two views", lambda: _of_views(_swav)),
    plain("two towers, loss outside", lambda: _of_towers(_clip)),
    plain("two towers, loss of pairs outside", lambda: _of_towers(_siglip)),
    plain("two calls, each a target of the other", _siamese),
    plain("two calls with other masks", _dropped),
    plain("distillation", _taught, 0.7),
    plain("a moving average", _averaged, 0.7),
    plain("a predictor of a slow copy", _predicted),
    plain("a call for each size of crops", _crops),
    plain("a policy", _proximal),
    plain("a clipped policy", _clipped_policy, 0.7),
)
