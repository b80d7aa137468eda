"""Generated source of four small models, as it stands in `golden/`.

After a change that is meant, write the files anew and read the difference:

    RKMATE_WRITE_GOLDEN=1 python -m pytest tests/codegen/test_golden.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.semantics.steps import planned

MADE_WITH = "2.13"
"""Of torch, whose decompositions and names are in the files."""


class _Tied(nn.Module):
    """One parameter used twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(x @ self.weight) * self.scale
        return hidden.sum(1), F.silu(hidden) @ self.weight.t()


MODELS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": ("recompute-all", lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), (16, 8)),
    "transformer": ("recompute-all", lambda: nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.1, batch_first=True), (2, 8, 16)),
    "convolution": ("chen", lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)), (2, 3, 8, 8)),
    "two_outputs": ("recompute-all", _Tied, (4, 6)),
}


@pytest.mark.skipif(not torch.__version__.startswith(f"{MADE_WITH}."), reason=f"made with torch {MADE_WITH}")
@pytest.mark.parametrize("name", MODELS)
def test_generated_source(name: str) -> None:
    planner, make, shape = MODELS[name]
    arguments: tuple[Any, ...] = (torch.zeros(shape),)
    found = planned(make(), *arguments, planner=planner).source
    file = Path(__file__).parent / "golden" / f"{name}.txt"
    if os.environ.get("RKMATE_WRITE_GOLDEN"):
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")
