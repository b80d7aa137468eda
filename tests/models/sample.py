"""A model with inputs of its forward and a loss of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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


def weighted_mean(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mean of an output of this shape under random weights.

    The loss is not the module's, and neither is its memory. `mse_loss`, for one, would hold as many
    bytes as the output until the backward is over.
    """
    weights = torch.randn(*shape)
    return lambda output: (output * weights).mean()


def cross_entropy(classes: int, *shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cross entropy of logits, classes last, against random labels of this shape."""
    labels = torch.randint(classes, shape).flatten()
    return lambda output: F.cross_entropy(output.flatten(0, -2), labels)
