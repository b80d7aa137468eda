"""Scenarios of `field.py`: optimizers of other kinds, averages of weights, and changes between steps."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scenarios.base import Block, Scenario, Task, batch, blocks, looped, plain, squared, stepped


def _trained(train: Callable[[nn.Module, Callable[[], torch.Tensor]], list[float]]) -> Task:
    """A loop of a user's. `train`: gets the model, and computes its loss by the other argument."""
    x, y = batch(), batch()

    def loss(m: Any) -> torch.Tensor:
        return F.mse_loss(m(x), y)
    return Task(blocks(), loss, train=lambda m: train(m, lambda: loss(m)))


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


def _sharpness_aware() -> Task:
    x, labels = batch(), torch.randint(0, 32, (128,))

    def train(m: Any) -> list[float]:
        optimizer, losses = torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), []
        for _ in range(4):
            F.cross_entropy(m(x), labels).backward()
            moves = [p.grad * 0.05 for p in m.parameters()]
            with torch.no_grad():
                for p, move in zip(m.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), labels)
            loss.backward()
            with torch.no_grad():
                for p, move in zip(m.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    return looped(blocks(), lambda m, _: F.cross_entropy(m(x), labels), train)


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


def _averaged() -> Task:
    x = batch()

    def train(m: Any) -> list[float]:
        average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        losses = []
        for _ in range(3):
            losses += stepped(m, lambda m, _: m(x).square().mean(), 2)
            average.update_parameters(m)
            with torch.no_grad():
                losses.append(average(x).sum().item())
        return losses
    return looped(blocks(4, nn.BatchNorm1d(32)), lambda m, _: m(x).square().mean(), train)


def _scaled() -> Task:
    """bfloat16 under autocast with a scaler, accumulation and clipping."""
    x, y, model = batch(), torch.randint(0, 32, (128,)), blocks()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)

    def step(m: Any) -> torch.Tensor:
        for k in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(m(x[k::2]), y[k::2]) / 2
            if k == 0:
                scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        return loss
    return Task(model, step)


def _pruned() -> Task:
    x = batch()

    def square(m: Any, number: int) -> torch.Tensor:
        out: torch.Tensor = m(x)
        return out.square().mean()

    def train(m: Any) -> list[float]:
        losses = []
        for _ in range(3):
            for block in m:
                prune.l1_unstructured(block.up, "weight", amount=0.2)
            losses += stepped(m, square, 2)
        for block in m:
            prune.remove(block.up, "weight")
        return losses + stepped(m, square, 2)
    return looped(blocks(), square, train)


def _penalised(change: Callable[[nn.Module], Any]) -> Task:
    """A penalty on weights that a hook makes."""
    model, x = blocks(), batch()
    for block in model:
        change(block.up)
    return looped(model, lambda m, _: m(x).square().mean() + 0.1 * sum(b.up.weight.abs().mean() for b in m))


class Grows(nn.Module):
    """Gets another layer now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.share = nn.ModuleList([Block(), Block()]), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mix of what the last layer gets and gives."""
        for layer in self.layers[:-1]:
            x = layer(x)
        return torch.lerp(x, self.layers[-1](x), self.share)


def _grow(m: Any, number: int) -> None:
    if number in (2, 4):
        m.layers.append(Block())
    m.share = 0.5 if number in (2, 4) else 1.0


def _thaw(m: Any, number: int) -> None:
    for k, block in enumerate(m):
        block.requires_grad_(k >= 3 - number)


def _replace(m: Any, number: int) -> None:
    """Make the weights views of one vector, and later other parameters."""
    if number == 2:
        vector = torch.nn.utils.parameters_to_vector(m.parameters()).detach() * 0.99
        torch.nn.utils.vector_to_parameters(vector, m.parameters())
    if number == 4:
        m.load_state_dict({k: v * 0.99 for k, v in copy.deepcopy(m.state_dict()).items()}, assign=True)


class Fails(nn.Module):
    """Raises an error on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = blocks(2), blocks(2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of all layers."""
        x = self.first(x)
        if self.fails:
            raise RuntimeError("no more")
        out: torch.Tensor = self.second(x)
        return out


def _interrupted() -> Task:
    x = batch()

    def train(m: Any) -> list[float]:
        losses = []
        for number in range(6):
            with contextlib.suppress(RuntimeError):
                m.fails = number == 2
                loss = m(x).square().mean()
                if number == 4:
                    raise RuntimeError("before the backward")
                m.zero_grad()
                loss.backward()
                losses.append(loss.item())
        return losses
    return looped(Fails(), lambda m, _: m(x).square().mean(), train)


SCENARIOS: tuple[Scenario, ...] = (
    plain("a step at the worst place nearby", lambda: _trained(_sharp)),
    plain("sharpness-aware steps", _sharpness_aware),
    plain("lbfgs", lambda: _trained(_closures)),
    plain("gradients by hand", lambda: _trained(_by_hand)),
    plain("an optimizer in hooks", lambda: _trained(_in_hooks)),
    plain("an averaged model", lambda: _trained(_averages)),
    plain("an averaged model with buffers", _averaged),
    plain("a scaler, accumulation, clipping", _scaled, 0.7),
    plain("pruned again and again", _pruned),
    plain("a penalty on pruned weights", lambda: _penalised(
        functools.partial(prune.l1_unstructured, name="weight", amount=0.3))),
    plain("a penalty on normed weights, by hooks", lambda: _penalised(nn.utils.weight_norm)),
    plain("a penalty on weights of spectral norm, by hooks", lambda: _penalised(nn.utils.spectral_norm)),
    plain("layers that are added", lambda: squared(Grows(), _grow)),
    plain("blocks thawed in every step", lambda: squared(blocks(), _thaw)),
    plain("weights from a vector, and assigned", lambda: squared(blocks(), _replace)),
    plain("errors in the middle", _interrupted),
)
