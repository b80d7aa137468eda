"""Random modules: straight-line programs over a pool of tensors.

Every value is a tensor of shape (4, *, 8); operations take earlier values by number, so most values
are used in several places, or in none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

Pool = list[torch.Tensor]


def _last(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two values of one shape: the first rows of the longer."""
    n = min(a.shape[1], b.shape[1])
    return a[:, :n], b[:, :n]


# Where eager mode writes into a tensor that is not contiguous (also in the gradient of a maximum), a
# trace makes a contiguous one, and later sums are taken in another order: up to rounding only, so
# these operations get contiguous values here.
OPERATIONS: dict[str, Callable[[nn.ModuleDict, torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "linear": lambda m, a, b: [m["linear"](a)],
    "other linear": lambda m, a, b: [m["other"](a)],
    "tied": lambda m, a, b: [F.linear(a, m["linear"].weight.t())],
    "norm": lambda m, a, b: [m["norm"](a)],
    "batch norm": lambda m, a, b: [m["batch"](a.transpose(1, 2)).transpose(1, 2)],
    "dropout": lambda m, a, b: [F.dropout(a, 0.3)],
    "add": lambda m, a, b: [torch.add(*_last(a, b))],
    "multiply": lambda m, a, b: [torch.mul(*_last(a, b)).tanh()],
    "broadcast": lambda m, a, b: [a + b.mean(1, keepdim=True)],
    "outer": lambda m, a, b: [a * b.mean((1, 2), keepdim=True).sigmoid()],
    "chunk": lambda m, a, b: [torch.cat([x.sin(), y], -1) for x, y in [a.chunk(2, -1)]],
    "split": lambda m, a, b: [t.repeat(1, 1, 2) for t in a.split(4, -1)],
    "concatenate": lambda m, a, b: [torch.cat([a, b], 1)[:, -6:]],
    "halves": lambda m, a, b: [a[:, ::2].contiguous()],
    "flip": lambda m, a, b: [a.flip(1)],
    "reshape": lambda m, a, b: [a.reshape(4, 8, -1).transpose(1, 2).relu()],
    "permute": lambda m, a, b: [a.permute(2, 0, 1).exp().neg().permute(1, 2, 0).sigmoid()],
    "expand": lambda m, a, b: [a.sum(1, keepdim=True).expand_as(a).tanh() - a],
    "in place": lambda m, a, b: [a.clone().add_(1).relu_()],
    "in place on a view": lambda m, a, b: [_written(a, b)],
    "fill": lambda m, a, b: [_masked(a)],
    "softmax": lambda m, a, b: [a.softmax(-1)],
    "attention": lambda m, a, b: [F.scaled_dot_product_attention(a, b, b.tanh())],
    "matmul": lambda m, a, b: [(a @ b.transpose(1, 2)).softmax(-1) @ b],
    "gather": lambda m, a, b: [a.index_select(1, torch.arange(a.shape[1] - 1, -1, -1))],
    "maximum": lambda m, a, b: [torch.maximum(*(t.contiguous() for t in _last(a, b)))],
    "top": lambda m, a, b: [a.topk(4, -1).values.repeat(1, 1, 2)],
    "cumulate": lambda m, a, b: [a.cumsum(1) * 0.1],
    "detach": lambda m, a, b: [a + b.detach().mean()],
    "noise": lambda m, a, b: [a + 0.1 * torch.rand_like(a)],
    "stack": lambda m, a, b: [torch.stack(_last(a, b)).prod(0).tanh()],
    "unbind": lambda m, a, b: [torch.stack(a.unbind(1)[::-1], 1)],
}


def _written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clone(memory_format=torch.contiguous_format)
    x, y = _last(a, b)
    x[..., :4] = y[..., 4:]
    a[:, 0].mul_(0.5)
    return a


def _masked(a: torch.Tensor) -> torch.Tensor:
    return a.masked_fill(torch.ones(a.shape[1], 8, dtype=torch.bool).triu(1), 0.0)


@dataclass(frozen=True)
class Step:
    """One operation and the numbers of the values it takes (counted from the latest, modulo)."""

    operation: str
    first: int
    second: int


@dataclass(frozen=True)
class Recipe:
    """A random module: its steps, and which values it returns."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    seed: int


class Program(nn.Module):
    """Runs a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.parts = nn.ModuleDict({
            "linear": nn.Linear(8, 8), "other": nn.Linear(8, 8), "norm": nn.LayerNorm(8),
            "batch": nn.BatchNorm1d(8)})
        self.start = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        pool = [self.start(x)]
        for step in self.recipe.steps:
            a, b = pool[-1 - step.first % len(pool)], pool[-1 - step.second % len(pool)]
            pool += OPERATIONS[step.operation](self.parts, a, b)
        # Each output ends in the start, so that no loss is without a gradient.
        return [pool[-1 - k % len(pool)] + pool[0].mean() for k in self.recipe.outputs]


_numbers = st.one_of(st.just(0), st.integers(0, 12))
steps = st.builds(Step, st.sampled_from(sorted(OPERATIONS)), _numbers, _numbers)
recipes = st.builds(
    Recipe, st.lists(steps, min_size=5, max_size=40).map(tuple),
    st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple), st.integers(0, 3))
