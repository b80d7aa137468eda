"""What the scenarios of `field.py` are made of, and the small networks that several of them train."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import rkmate

Step = Callable[[Any], torch.Tensor]
"""Runs a module's forward on a batch, and returns the loss."""


@dataclass
class Task:
    """A model, and a step of its training."""

    model: nn.Module
    step: Step
    planned: nn.Module | None = None
    """The part that gets the budget; None: the model itself."""
    train: Callable[[Any], list[float]] | None = None
    """Trains the model as a library does, and returns the losses; None: a loop of steps does."""


@dataclass(frozen=True)
class Scenario:
    """A model that people train, and what they write."""

    library: str
    name: str
    model: str
    """The model, as a user writes it."""
    make: Callable[[], Task]
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    budget: float = 0.7
    """The budget, as a share of the plain peak."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `rkmate.Settings`."""
    skips_layers: bool = False
    """Whether a step does not call all of its layers (which drop out at random, or are never called): the
    smallest budget has room for all of them."""

    @property
    def lines(self) -> str:
        """What a user writes, apart from the training loop."""
        given = "".join(f", settings=rkmate.Settings({k}={v!r})" for k, v in self.settings.items())
        return f"rkmate.apply({self.model}, budget={self.budget:g}{given})"

    def put(self, model: nn.Module, budget: int, costs: Any) -> nn.Module:
        """Give a module the budget."""
        settings: dict[str, Any] = {"costs": costs, **self.settings}
        return rkmate.apply(model, budget=budget, settings=rkmate.Settings(**settings), progress=False)


def training(library: str, name: str, lines: str, make: Callable[[], Task], *needs: str,
             **others: Any) -> Scenario:
    """A scenario that a library trains."""
    return Scenario(library, name, lines, make, (library, *needs), **others)


def net(library: str, module: str, name: str, lines: str, make: Callable[[Any], Task],
        **others: Any) -> Scenario:
    """A model of a library that may be absent. `make`: gets `module`."""
    def made() -> Task:
        return make(importlib.import_module(module))
    with_torchvision = ("torchvision",) if library in ("timm", "segmentation_models_pytorch") else ()
    return Scenario(library, name, lines, made, (module.split(".")[0], *with_torchvision), **others)


def plain(name: str, make: Callable[[], Task], budget: float = 0.6, lines: str = "model",
          **others: Any) -> Scenario:
    """A model of torch alone."""
    return Scenario("torch", name, lines, make, budget=budget, **others)


# -- Networks --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of an MLP with a residual."""

    def __init__(self, width: int = 32, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the layer adds."""
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


def blocks(number: int = 4, *others: nn.Module, drop: float = 0.0) -> nn.Sequential:
    """Layers in a row."""
    return nn.Sequential(*(Block(drop=drop) for _ in range(number)), *others)


def batch(number: int = 128) -> torch.Tensor:
    """A batch for `blocks`."""
    return torch.randn(number, 32)


# -- Steps and loops -------------------------------------------------------------------------------

Loss = Callable[[Any, int], torch.Tensor]
"""Returns the loss of a model in a step, by its number."""


def to_zero(model: nn.Module, x: torch.Tensor | None = None) -> Task:
    """A step whose loss is the distance of the results from zero. `x`: the batch."""
    given = batch() if x is None else x
    return Task(model, lambda m: F.mse_loss(out := m(given), torch.zeros_like(out)))


def classified(model: nn.Module, x: torch.Tensor, classes: int = 10) -> Task:
    """A step of a classifier."""
    y = torch.randint(0, classes, (len(x),))
    return Task(model, lambda m: F.cross_entropy(m(x), y))


def stepped(model: Any, loss_of: Loss, steps: int, *, rate: float = 0.05) -> list[float]:
    """Train, and return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def looped(model: nn.Module, loss_of: Loss, train: Callable[[Any], list[float]] | None = None) -> Task:
    """A loop of its own around a loss. `train`: the loop; None: six steps."""
    return Task(model, lambda m: loss_of(m, 0), train=train or (lambda m: stepped(m, loss_of, 6)))


def squared(model: nn.Module, change: Callable[[Any, int], Any] | None = None) -> Task:
    """A loop over squared results. `change`: what happens before each step."""
    x = batch()

    def loss_of(m: Any, number: int) -> torch.Tensor:
        if change is not None:
            change(m, number)
        out: torch.Tensor = m(x)
        return out.square().mean()
    return looped(model, loss_of)
