"""A mixture of experts in which the data decide which experts run, and on how many rows."""

from __future__ import annotations

import torch
from dtr_compare import Task, compare, show
from torch import nn


class Mixture(nn.Module):
    """Each layer sends every row to its best expert; experts without rows do not run."""

    def __init__(self, width: int, experts: int, layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(experts)
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weight, choice = gate(x).softmax(1).max(1)
            result = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows = (choice == number).nonzero().squeeze(1)
                if len(rows):
                    result = result.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            x = x + result
        return x


def task(width: int = 64, rows: int = 2048, experts: int = 4, layers: int = 6) -> Task:
    """A training step per batch of rows."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(rows - 256 * number, width)
        return (model(x) - x.roll(1, 1)).square().mean()

    return Task("mixture of experts", lambda: Mixture(width, experts, layers), loss)


if __name__ == "__main__":
    show(compare(task()))
