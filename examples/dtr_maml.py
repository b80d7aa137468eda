"""MAML: the outer gradient flows through unrolled inner steps of gradient descent."""

from __future__ import annotations

import torch
from dtr_compare import Task, compare, show
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


def task(width: int = 128, batch: int = 512, inner: int = 12, rate: float = 0.02) -> Task:
    """A meta-training step: regression of random sine waves, ``inner`` steps deep."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        phase = torch.rand(()) * 3
        x = torch.rand(batch, 1) * 6
        y = (x + phase).sin()
        fast = dict(model.named_parameters())
        for _ in range(inner):
            error = F.mse_loss(functional_call(model, fast, (x,)), y)
            slopes = torch.autograd.grad(error, list(fast.values()), create_graph=True)
            fast = {
                name: value - rate * slope
                for (name, value), slope in zip(fast.items(), slopes, strict=True)
            }
        return F.mse_loss(functional_call(model, fast, (x,)), y)

    return Task("MAML", build, loss)


if __name__ == "__main__":
    show(compare(task()))
