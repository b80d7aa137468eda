"""Scenarios of `field.py`: several backwards in a step, gradients in a loss, and losses that take turns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.base import Scenario, Task, batch, blocks, plain


def _penalised() -> Task:
    x = batch().requires_grad_()

    def step(m: Any) -> torch.Tensor:
        grad, = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()
    return Task(blocks(3, nn.Linear(32, 1)), step)


def _against() -> Task:
    real, fake = batch(), batch()
    net = blocks(3, nn.Linear(32, 1))
    return Task(net, lambda m: F.softplus(-m(real)).mean() + F.softplus(m(fake)).mean())


def _adversaries(penalty: float = 0.0) -> Task:
    """A discriminator's step, and the generator's through it. `penalty`: of the discriminator's slope."""
    model, real = nn.ModuleDict({"makes": blocks(), "judges": blocks(4, nn.Linear(32, 1))}), batch()

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
        self.makes, self.judges = blocks(), blocks(4, nn.Linear(32, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the discriminator's loss if it gets real rows, else the generator's; and what was made."""
        fake = self.makes(noise)
        if real is None:
            return F.softplus(-self.judges(fake)).mean(), fake.detach()
        return F.softplus(-self.judges(real)).mean() + F.softplus(
            self.judges(fake.detach())).mean(), fake.detach()


def _turns() -> Task:
    real, noise = batch(), batch()

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
        self.trunk, self.left, self.right = blocks(), nn.Linear(32, 8), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of both."""
        x = self.trunk(x)
        return self.left(x), self.right(x)


def _in_turn(model: nn.Module, *losses: Callable[[Any], torch.Tensor]) -> Task:
    numbers, x = count(), batch()
    return Task(model, lambda m: losses[next(numbers) % len(losses)](m(x)))


def _cycle() -> Task:
    """CycleGAN: two generators, two discriminators."""
    model = nn.ModuleDict({"there": blocks(), "back": blocks(), "judges": blocks(2, nn.Linear(32, 1)),
                           "judges back": blocks(2, nn.Linear(32, 1))})
    x, y = batch(), batch()

    def step(m: Any) -> torch.Tensor:
        made, back = m["there"](x), m["back"](y)
        (F.l1_loss(m["back"](made), x) + F.l1_loss(m["there"](back), y)
         + F.softplus(-m["judges"](made)).mean()
         + F.softplus(-m["judges back"](back)).mean() + F.l1_loss(m["there"](y), y)
         + F.l1_loss(m["back"](x), x)).backward()
        return (F.softplus(m["judges"](made.detach())) + F.softplus(-m["judges"](y))
                + F.softplus(m["judges back"](back.detach())) + F.softplus(-m["judges back"](x))).mean()
    return Task(model, step)


class Coder(nn.Module):
    """An encoder, a decoder, and a judge of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.makes, self.judges = blocks(3), blocks(3), blocks(3, nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is made again."""
        out: torch.Tensor = self.makes(self.reads(x))
        return out


def _fooling(made: torch.Tensor, x: torch.Tensor, judged: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """An adversary's loss, weighted by gradients of the last layer (VQGAN)."""
    near, fooled = (made - x).abs().mean(), -judged.mean()
    one, other = (torch.autograd.grad(k, last, retain_graph=True)[0].norm() for k in (near, fooled))
    loss: torch.Tensor = near + (one / (other + 1e-4)).clamp(0, 1e4).detach() * fooled
    return loss


def _adaptive() -> Task:
    x, judge, model = batch(), blocks(1, nn.Linear(32, 1)).requires_grad_(False), blocks(6)

    def step(m: Any) -> torch.Tensor:
        return _fooling(made := m(x), x, judge(made), list(model.parameters())[-1])
    return Task(model, step)


def _adaptive_by_parts() -> Task:
    x, model = batch(), Coder()

    def step(m: Any) -> torch.Tensor:
        made = m.makes(m.reads(x))
        return _fooling(made, x, m.judges(made), list(model.makes.parameters())[-1])
    return Task(model, step)


def _one_by_one() -> Task:
    x = batch()

    def step(m: Any) -> torch.Tensor:
        made = m(x)
        for k in range(1, 3):
            (k * made).cos().mean().backward(retain_graph=True)
        return made.square().mean()
    return Task(blocks(6), step)


def _projected() -> Task:
    """Gradients of tasks without what conflicts (PCGrad)."""
    x, model = batch(), blocks(6)

    def step(m: Any) -> torch.Tensor:
        made, weights = m(x), [p for p in model.parameters() if p.requires_grad]
        losses = [(k * made).cos().mean() for k in range(1, 4)]
        found = [torch.cat([g.flatten() for g in torch.autograd.grad(k, weights, retain_graph=True)])
                 for k in losses]
        for k, g in enumerate(found):
            for h in found[:k] + found[k + 1:]:
                g = g - min(torch.zeros(()), g @ h) / h.square().sum() * h
        for p, part in zip(weights, g.split([p.numel() for p in weights]), strict=True):
            p.grad = part.view_as(p).clone()
        return (0.0 * losses[0]).detach()
    return Task(model, step)


def _balanced() -> Task:
    """Weights of losses from the sizes of gradients of a shared layer (GradNorm)."""
    x, model = batch(), blocks(6)

    def step(m: Any) -> torch.Tensor:
        made, last = m(x), list(model.parameters())[-1]
        losses = [(k * made).cos().mean() for k in range(1, 3)]
        weights = torch.ones(2, requires_grad=True)
        sizes = torch.stack([torch.autograd.grad(
            w * k, last, retain_graph=True, create_graph=True)[0].norm()
            for w, k in zip(weights, losses, strict=True)])
        slope, = torch.autograd.grad((sizes - sizes.mean().detach()).abs().sum(), weights)
        moved = (weights - slope).detach()
        return moved[0] * losses[0] + moved[1] * losses[1]
    return Task(model, step)


def _attacked(trades: bool) -> Task:
    """Inputs that are moved up their slope (PGD); TRADES with a divergence from the clean ones."""
    x, y, model = batch(), torch.randint(0, 32, (128,)), blocks(5)

    def step(m: Any) -> torch.Tensor:
        clean = m(x).detach().softmax(-1)
        moved = x + 0.01 * torch.randn_like(x)
        for _ in range(2):
            moved = moved.detach().requires_grad_()
            found = m(moved)
            loss = F.kl_div(found.log_softmax(-1), clean, reduction="batchmean") if trades else \
                F.cross_entropy(found, y)
            moved = moved + 0.02 * torch.autograd.grad(loss, moved)[0].sign()
        if not trades:
            return F.cross_entropy(m(moved.detach()), y)
        found = m(x)
        return F.cross_entropy(found, y) + F.kl_div(
            m(moved.detach()).log_softmax(-1), found.softmax(-1), reduction="batchmean")
    return Task(model, step)


def _virtual() -> Task:
    """Virtual adversarial training: a direction by power iteration."""
    x, y = batch(), torch.randint(0, 32, (128,))

    def step(m: Any) -> torch.Tensor:
        found = m(x)
        target, way = found.detach().softmax(-1), F.normalize(torch.randn_like(x), dim=1).requires_grad_()
        near = F.kl_div(m(x + 0.1 * way).log_softmax(-1), target, reduction="batchmean")
        way = F.normalize(torch.autograd.grad(near, way)[0], dim=1)
        return F.cross_entropy(found, y) + F.kl_div(
            m(x + way).log_softmax(-1), target, reduction="batchmean")
    return Task(blocks(5), step)


def _sobolev() -> Task:
    """A field and its slope with respect to places, outside of the network (physics-informed)."""
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                                        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            return out

    x = torch.rand(256, 2)

    def step(m: Any) -> torch.Tensor:
        at = x.clone().requires_grad_()
        u = m(at)
        slope, = torch.autograd.grad(u.sum(), at, create_graph=True)
        second, = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        return (slope[:, 1] - second[:, 0]).square().mean() + u.square().mean()
    return Task(Field(), step)


SCENARIOS: tuple[Scenario, ...] = (
    plain("discriminator, two calls", _against, 0.8),
    plain("adversaries in one module", _adversaries),
    plain("adversaries, with a penalty", lambda: _adversaries(10.0), 0.8),
    plain("adversaries whose one forward takes turns", _turns),
    plain("generators and judges in a cycle", _cycle),
    plain("the weight of an adversary", _adaptive, 0.7),
    plain("the weight of an adversary, by parts", _adaptive_by_parts, 0.7),
    plain("attacked inputs", lambda: _attacked(False), 0.7),
    plain("attacked inputs, a divergence", lambda: _attacked(True), 0.7),
    plain("virtual adversaries", _virtual, 0.7),
    plain("gradient penalty outside", _penalised, 1.0),
    plain("slopes of a field", _sobolev, 1.0),
    plain("losses one by one", _one_by_one, 0.7),
    plain("projected gradients", _projected, 0.7),
    plain("balanced gradients", _balanced, 1.0),
    plain("losses in turn", lambda: _in_turn(blocks(), lambda x: x.square().mean(),
                                             lambda x: F.cross_entropy(x, torch.arange(128) % 32))),
    plain("heads in turn", lambda: _in_turn(Heads(), lambda x: x[0].square().mean(),
                                            lambda x: x[1].square().mean())),
)
