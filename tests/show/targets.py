"""Factories for the command line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.show.models import Scores, tower


def sample() -> Any:
    return tower(2)


def with_keywords() -> Any:
    model, (ids,) = tower(2)
    return model, (), {"ids": ids}


def model_only() -> Any:
    return Scores()


def wrong_arguments() -> Any:
    return Scores(), torch.zeros(2)


def named_arguments() -> Any:
    return Scores(), {"x": torch.zeros(2)}


def with_a_loss() -> Any:
    return Scores(), (torch.zeros(2),), torch.sum


def too_much() -> Any:
    return Scores(), (torch.zeros(2),), {}, 0, 0


def takes_a_batch(batch: int) -> Any:
    return Scores(), (torch.zeros(batch),)


def broken() -> Any:
    raise ValueError("no data here")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


def branching() -> Any:
    return Branch(), (torch.randn(2, 4),)


number = 3
SCORES = Scores()
