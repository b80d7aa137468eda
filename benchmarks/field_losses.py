"""Further scenarios of `field.py`: losses of several calls outside of the model (contrast, self-supervision),
adversaries in a cycle, policies, and loops that run more than one forward and backward before a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from field_loops import _blocks, _row, _rows
from field_scenarios import Block, Scenario, Task
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

Loss = Callable[..., torch.Tensor]


def _of_views(loss: Loss, together: bool = False) -> Task:
    """Two views of a batch, each in a call of its own; `together`: in one call."""
    one, other = _rows(), _rows()
    both = torch.cat([one, other])
    return Task(_blocks(6), lambda m: loss(*(m(both).chunk(2) if together else (m(one), m(other)))))


def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """SimCLR's loss."""
    rows = F.normalize(torch.cat([one, other]), dim=1)
    logits = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(one)))


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


def _supervised(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(torch.cat([one, other]), dim=1)
    alike = (torch.arange(len(rows))[:, None] % 8 == torch.arange(len(rows)) % 8).float().fill_diagonal_(0)
    logits = rows @ rows.T / 0.1
    logits = logits - logits.max(1, keepdim=True)[0].detach()
    others = (logits.exp() * (1 - torch.eye(len(rows)))).sum(1, keepdim=True)
    return -((alike * (logits - others.log())).sum(1) / alike.sum(1)).mean()


class Towers(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.scale = _blocks(), _blocks(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return normalised rows of both, and the scale of logits."""
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1), self.scale.exp()


def _of_towers(loss: Loss) -> Task:
    x, y = _rows(), _rows()

    def step(m: Any) -> torch.Tensor:
        one, other, scale = m(x, y)
        return loss(scale * one @ other.T)
    return Task(Towers(), step)


def _clip(logits: torch.Tensor) -> torch.Tensor:
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def _siglip(logits: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * (logits - 2)).sum() / len(logits)


class Patches(nn.Module):
    """A small vision transformer without attention, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers, self.head = nn.Conv2d(3, 32, 4, 4), _blocks(), nn.Linear(32, 64)

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


def _predicted() -> Task:
    """BYOL: a predictor on a network, whose slow copy is the target."""
    model = nn.ModuleDict({"online": _blocks(), "predicts": _blocks(1, nn.Linear(32, 32))})
    target = copy.deepcopy(model["online"]).requires_grad_(False)
    one, other = _rows(), _rows()

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), m["online"].parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            first, second = target(one), target(other)
        return -(F.cosine_similarity(m["predicts"](m["online"](one)), second).mean()
                 + F.cosine_similarity(m["predicts"](m["online"](other)), first).mean())
    return Task(model, step)


def _cycle() -> Task:
    """CycleGAN: two generators, two discriminators."""
    model = nn.ModuleDict({"there": _blocks(), "back": _blocks(), "judges": _blocks(2, nn.Linear(32, 1)),
                           "judges back": _blocks(2, nn.Linear(32, 1))})
    x, y = _rows(), _rows()

    def step(m: Any) -> torch.Tensor:
        made, back = m["there"](x), m["back"](y)
        (F.l1_loss(m["back"](made), x) + F.l1_loss(m["there"](back), y)
         + F.softplus(-m["judges"](made)).mean()
         + F.softplus(-m["judges back"](back)).mean() + F.l1_loss(m["there"](y), y)
         + F.l1_loss(m["back"](x), x)).backward()
        return (F.softplus(m["judges"](made.detach())) + F.softplus(-m["judges"](y))
                + F.softplus(m["judges back"](back.detach())) + F.softplus(-m["judges back"](x))).mean()
    return Task(model, step)


def _trained(train: Callable[[nn.Module, Callable[[], torch.Tensor]], list[float]]) -> Task:
    """A loop of a user's. `train`: gets the model, and computes its loss by the other argument."""
    x, y = _rows(), _rows()

    def loss(m: Any) -> torch.Tensor:
        return F.mse_loss(m(x), y)
    return Task(_blocks(), loss, train=lambda m: train(m, lambda: loss(m)))


def _sharp(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[float]:
    """SAM: a step at the worst place nearby."""
    weights, found = list(model.parameters()), []
    optimizer = torch.optim.SGD(weights, 0.01)
    for _ in range(4):
        loss().backward()
        norm = torch.stack([w.grad.norm() for w in weights if w.grad is not None]).norm()
        moves = [w.grad * (0.05 / norm) for w in weights if w.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        optimizer.zero_grad()
        there = loss()
        there.backward()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        optimizer.step()
        optimizer.zero_grad()
        found.append(there.item())
    return found


def _closures(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[float]:
    """LBFGS, which calls a closure as often as it likes."""
    optimizer, found = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), []

    def closure() -> float:
        optimizer.zero_grad()
        now = loss()
        now.backward()
        found.append(now.item())
        return found[-1]
    for _ in range(2):
        optimizer.step(closure)
    return found


def _by_hand(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[float]:
    """Gradients of `torch.autograd.grad`."""
    weights, found = list(model.parameters()), []
    for _ in range(4):
        now = loss()
        with torch.no_grad():
            for weight, grad in zip(weights, torch.autograd.grad(now, weights), strict=True):
                weight.sub_(grad, alpha=0.01)
        found.append(now.item())
    return found


def _in_hooks(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[float]:
    """An optimizer for each parameter, whose step a hook runs."""
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]
    hooks = [p.register_post_accumulate_grad_hook(update) for p in optimizers]
    found = []
    for _ in range(4):
        now = loss()
        now.backward()
        found.append(now.item())
    for hook in hooks:
        hook.remove()
    return found


def _averages(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[float]:
    """A copy that holds the average of the weights."""
    optimizer, average, found = torch.optim.SGD(model.parameters(), 0.01), AveragedModel(model), []
    for _ in range(4):
        now = loss()
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        found.append(now.item())
    with torch.no_grad():
        return [*found, average(torch.ones(4, 32)).sum().item()]


def _dropped() -> Task:
    """R-Drop: two calls with other masks, which have to agree."""
    x, y = _rows(), torch.randint(0, 10, (128,))

    def step(m: Any) -> torch.Tensor:
        one, other = m(x).log_softmax(-1), m(x).log_softmax(-1)
        return F.nll_loss(one, y) + F.nll_loss(other, y) + (
            F.kl_div(one, other, reduction="batchmean", log_target=True)
            + F.kl_div(other, one, reduction="batchmean", log_target=True)) / 2
    return Task(nn.Sequential(*(Block(drop=0.1) for _ in range(4)), nn.Linear(32, 10)), step)


class Policy(nn.Module):
    """A policy and a value on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = _blocks(), nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of actions, and values."""
        x = self.trunk(x)
        return self.policy(x), self.value(x)[:, 0]


def _proximal() -> Task:
    """PPO: rollouts without gradients, then epochs of minibatches."""
    x, gains = _rows(256), torch.randn(256)

    def loss(m: Any, rows: torch.Tensor, before: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        logits, values = m(x[rows])
        actor = torch.distributions.Categorical(logits=logits)
        ratio = (actor.log_prob(actions[rows]) - before[rows]).exp()
        gain = gains[rows] - values.detach()
        return (-torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                + F.mse_loss(values, gains[rows]) / 2 - 0.01 * actor.entropy().mean())

    def train(m: Any) -> list[float]:
        optimizer, found = torch.optim.Adam(m.parameters(), 1e-3), []
        for _ in range(2):
            with torch.no_grad():
                actor = torch.distributions.Categorical(logits=m(x)[0])
                actions = actor.sample()
                before = actor.log_prob(actions)
            for rows in torch.randperm(256).chunk(2):
                optimizer.zero_grad()
                now = loss(m, rows, before, actions)
                now.backward()
                optimizer.step()
                found.append(now.item())
        return found
    rows = torch.arange(128)
    return Task(Policy(), lambda m: loss(m, rows, torch.zeros(256), torch.zeros(256).long()), train=train)


SCENARIOS: tuple[Scenario, ...] = (
    _row("contrast of two views", lambda: _of_views(contrast)),
    _row("contrast of two views, in one call", lambda: _of_views(contrast, True)),
    _row("contrast within classes", lambda: _of_views(_supervised)),
    _row("redundancy of two views", lambda: _of_views(_barlow)),
    _row("variance and covariance of two views", lambda: _of_views(_vicreg)),
    _row("assignments of two views", lambda: _of_views(_swav)),
    _row("two towers, loss outside", lambda: _of_towers(_clip)),
    _row("two towers, loss of pairs outside", lambda: _of_towers(_siglip)),
    _row("a call for each size of crops", _crops),
    _row("a predictor of a slow copy", _predicted),
    _row("generators and judges in a cycle", _cycle),
    _row("a step at the worst place nearby", lambda: _trained(_sharp)),
    _row("lbfgs", lambda: _trained(_closures)),
    _row("gradients by hand", lambda: _trained(_by_hand)),
    _row("an optimizer in hooks", lambda: _trained(_in_hooks)),
    _row("an averaged model", lambda: _trained(_averages)),
    _row("two calls with other masks", _dropped),
    _row("a policy", _proximal),
)
