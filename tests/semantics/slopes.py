"""Random operations, and the gap between a planned module's gradients and the slope of its loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.semantics.steps import three_budgets


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.noisy(torch.tanh(self.first(x)))))

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Dropout(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.4, self.training)


class FeatureDropout(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout2d(x[:, :, None, None].expand(-1, -1, 2, 2), 0.4, self.training).mean((2, 3))


class Dropout1d(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout1d(x[:, :, None].expand(-1, -1, 3), 0.4, self.training).mean(2)


class Dropout3d(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        wide = x[:, :, None, None, None].expand(-1, -1, 2, 2, 2)
        return F.dropout3d(wide, 0.4, self.training).mean((2, 3, 4))


class FeatureAlphaDropout(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.feature_alpha_dropout(x[:, :, None].expand(-1, -1, 3), 0.4, self.training).mean(2)


class AlphaDropout(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.alpha_dropout(x, 0.4, self.training)


class StochasticDepth(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        keep = (torch.rand(x.shape[0], 1, dtype=x.dtype) > 0.4).to(x.dtype)
        return x + torch.sin(x) * keep / 0.6


class RandomSlope(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(x, 0.1, 0.5, self.training)


class Gumbel(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return F.gumbel_softmax(x, tau=0.7, dim=-1)


class Noise(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.rand_like(x)) + 0.1 * torch.randn_like(x)


class AttentionDropout(_Body):
    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 2, -1, 3)
        return F.scaled_dot_product_attention(q, q, q.tanh(), dropout_p=0.4).reshape(x.shape)


KINDS = [Dropout, Dropout1d, FeatureDropout, Dropout3d, AlphaDropout, FeatureAlphaDropout,
         StochasticDepth, RandomSlope, Gumbel, Noise, AttentionDropout]


def with_three_budgets(kind: type[nn.Module]) -> tuple[nn.Module, list[rkmate.PlannedModule], torch.Tensor]:
    """Return a model in float64, planned at three budgets, and its input."""
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(4, 6, dtype=torch.float64)
    return model, three_budgets(model, x), x


def largest_gap(model: nn.Module, modules: list[rkmate.PlannedModule], x: torch.Tensor, steps: int = 3
                ) -> list[float]:
    """Return the largest relative gap to central differences in float64, for each of a model's plans.

    Slopes below 1e-1 count as 1e-1: there the differences are rounded away.
    """
    return [max(_gap(model, module, x, step) for step in range(steps)) for module in modules]


def _gap(model: nn.Module, module: rkmate.PlannedModule, x: torch.Tensor, seed: int) -> float:
    """One step's largest gap; the parameters move afterwards."""
    def loss() -> torch.Tensor:
        torch.manual_seed(seed)
        return module(x).pow(2).sum()  # type: ignore[no-any-return]

    model.zero_grad()
    loss().backward()
    gaps = []
    for parameter in model.parameters():
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
            above = loss()
            parameter.sub_(direction, alpha=2e-6)
            below = loss()
            parameter.add_(direction, alpha=1e-6)
        assert parameter.grad is not None
        slope = (parameter.grad * direction).sum()
        gaps.append(((slope - (above - below) / 2e-6).abs() / slope.abs().clamp_min(0.1)).item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)
    return max(gaps)
