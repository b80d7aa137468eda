"""Small modules that do what a tracer finds hard: views, in-place operations, shared weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.sample import Sample


class ViewLayer(nn.Module):
    """Slices, transposes, chunks, in-place updates of views; a counter that the forward moves."""

    steps: torch.Tensor
    average: torch.Tensor

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(width))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        h = self.qkv(x)
        h[..., 0].mul_(2.0)
        q, k, v = h.chunk(3, dim=-1)
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * q.mean(dim=(0, 1)))
        mixed = torch.einsum("bik,bjk->bij", q, k).softmax(-1)
        y = (mixed @ v).transpose(1, 2).contiguous().view(x.shape[0], -1, x.shape[1])
        y = y.transpose(1, 2).clone()
        y[:, ::2] += x[:, ::2]
        y = F.dropout(y, self.dropout, self.training).relu_()
        y = self.out(y).mul_(self.scale)
        left, right = y.split(y.shape[-1] // 2, dim=-1)
        return torch.cat([right, left.sin()], dim=-1)


class Views(nn.Module):
    """Layers, and an output of several views of one small tensor."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewLayer(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return {"rows": y.transpose(0, 1), "first": y[:, 0], "again": y.expand(2, *y.shape)[1]}


def views_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    """All three outputs count."""
    return output["rows"].square().mean() + output["first"].mean() + output["again"].abs().mean()


def views(dropout: float = 0.0, seed: int = 0) -> Sample:
    """Views and in-place operations; the output is a dictionary with views of one tensor."""
    torch.manual_seed(seed)
    return Sample(Views(64, 3, dropout).train(), (torch.randn(8, 32, 64),), {}, views_loss)


class Tied(nn.Module):
    """One matrix embeds and classifies; one layer is applied three times."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 64)
        self.layer = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(dropout),
                                   nn.Linear(128, 64))
        self.head = nn.Linear(64, 90, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, *,
                target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embedding(x)
        for _ in range(3):
            h = h + self.layer(h)
        logits = self.head(h)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


def tied(dropout: float = 0.0, seed: int = 0) -> Sample:
    """Weights used more than once; a keyword argument; a tuple out."""
    torch.manual_seed(seed)
    x, target = torch.randint(90, (8, 48)), torch.randint(90, (8, 48))
    return Sample(Tied(dropout).train(), (x,), {"target": target}, lambda output: output[0])
