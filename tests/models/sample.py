"""A model with inputs of its forward and a loss of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Sample:
    """A model in train mode, and what a training step on it needs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]
    """Output of the forward -> scalar that the backward starts from."""


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computed itself."""
    loss: torch.Tensor = output.loss
    return loss


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """A loss for outputs without labels."""
    return output.square().mean()
