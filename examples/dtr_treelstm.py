"""A binary TreeLSTM on random trees: every step has another graph."""

from __future__ import annotations

import random
from typing import Any

import torch
from dtr_compare import Task, compare, show
from torch import nn
from torch.nn import functional as F


def random_tree(source: random.Random, leaves: list[int]) -> Any:
    """A tree of nested pairs over ``leaves``."""
    if len(leaves) == 1:
        return leaves[0]
    cut = source.randint(1, len(leaves) - 1)
    return random_tree(source, leaves[:cut]), random_tree(source, leaves[cut:])


class TreeLSTM(nn.Module):
    """Tai et al. 2015, binary; one tree's nodes for a whole batch at a time."""

    def __init__(self, width: int, classes: int = 5) -> None:
        super().__init__()
        self.leaf = nn.Linear(width, 3 * width)
        self.node = nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, tree: Any, x: torch.Tensor) -> torch.Tensor:
        """Class scores; ``x`` holds a vector per leaf and batch row."""
        h, _ = self._visit(tree, x)
        return self.head(h)

    def _visit(self, tree: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tree, int):
            i, o, u = self.leaf(x[tree]).chunk(3, 1)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c
        (h1, c1), (h2, c2) = self._visit(tree[0], x), self._visit(tree[1], x)
        i, f1, f2, o, u = self.node(torch.cat([h1, h2], 1)).chunk(5, 1)
        c = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c


def task(width: int = 64, batch: int = 512, leaves: int = 24) -> Task:
    """A training step per tree."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        source = random.Random(number)
        count = leaves - number % 3
        tree = random_tree(source, list(range(count)))
        x = torch.randn(count, batch, width)
        return F.cross_entropy(model(tree, x), torch.randint(0, 5, (batch,)))

    return Task("TreeLSTM", lambda: TreeLSTM(width), loss)


if __name__ == "__main__":
    # With budgets this tight, the exact neighbourhood is worth its bookkeeping.
    show(compare(task(), heuristic="dtr"))
