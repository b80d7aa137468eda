"""Models that take no time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.sample import Sample

WIDTH, ROWS = 16, 256


def bounded(output: torch.Tensor) -> torch.Tensor:
    """A loss that takes no more than plans leave for one outside of the module."""
    return output.tanh().mean()


class Residual(nn.Module):
    """Blocks with a skip connection each: the smallest thing with something to plan."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


def residual(blocks: int = 3) -> Sample:
    torch.manual_seed(0)
    return Sample(Residual(blocks), (torch.randn(ROWS, WIDTH),), {}, bounded)


def stack() -> Sample:
    """The same without skip connections, as an nn.Sequential of four children."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
             for _ in range(4)]
    return Sample(nn.Sequential(*parts), (torch.randn(ROWS, WIDTH),), {},
                  bounded)
