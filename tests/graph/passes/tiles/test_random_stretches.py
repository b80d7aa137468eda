"""Random layers in tiles, in double precision: results and gradients are the original's, up to the order of
additions."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.options import options_of

WIDTH = 16
SHAPES = ((256, WIDTH), (8, 32, WIDTH), (4, 64, WIDTH))
POINTWISE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.silu, F.gelu, torch.tanh, F.relu, torch.sigmoid, lambda x: (-x * x).exp(), lambda x: x * 0.5,
    lambda x: x + 1, F.softplus, lambda x: F.leaky_relu(x, 0.1), F.hardswish, F.elu)


class Layers(nn.Module):
    """Operations on late values of those before, and some of the results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.same = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.along = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        draws = random.Random(self.seed)
        found = [self.same[0](x)]

        def late(rate: float = 0.8) -> torch.Tensor:
            return found[-1 - min(int(draws.expovariate(rate)), len(found) - 1)]

        def wide(y: torch.Tensor) -> torch.Tensor:
            k = draws.randrange(2)
            out: torch.Tensor = self.down[k](draws.choice(POINTWISE)(self.up[k](y)))
            return out

        def mixed(y: torch.Tensor) -> torch.Tensor:
            if y.dim() == 2:
                return torch.cat([y[:, :8], draws.choice(POINTWISE)(y[:, 8:])], -1)
            out: torch.Tensor = self.along[draws.randrange(2)](y.transpose(1, 2)).transpose(1, 2)
            return out

        ways: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
            *3 * (lambda y: draws.choice(POINTWISE)(y),), lambda y: self.same[draws.randrange(4)](y), wide,
            lambda y: y + late(), lambda y: y * torch.sigmoid(late()), self.norm,
            lambda y: y.softmax(-1) - y, mixed)
        for _ in range(draws.randint(4, 14)):
            found.append(draws.choice(ways)(late()))
        return [late(0.5) for _ in range(draws.randint(1, 3))]


def trained(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    outputs = module(x)
    sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in outputs).backward()
    return [*(t.detach() for t in outputs), *(p.grad for p in module.parameters())]


def check(seed: int) -> None:
    torch.manual_seed(seed)
    draws = random.Random(seed)
    model, x = Layers(seed).double(), torch.randn(draws.choice(SHAPES), dtype=torch.double)
    plain, options = copy.deepcopy(model), options_of(costs="analytic", progress=False, tiles="always")
    try:
        planned = rkmate.wrap(model, (x,), budget=draws.choice([0.2, 0.4, 0.6, 0.9]), **options)
    except rkmate.InfeasibleBudget as error:
        planned = rkmate.wrap(model, (x,), budget=error.minimum_bytes, **options)
    assert "tile" in planned.plan.variant
    for expected, actual in zip(trained(plain, x), trained(planned, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 34, 39, 82])
def test_tiles_compute_what_the_whole_does(seed: int) -> None:
    check(seed)
