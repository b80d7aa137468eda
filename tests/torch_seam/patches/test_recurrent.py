"""Recurrent layers compute with eager mode's arithmetic, bit for bit, whatever rows they go over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.equality import assert_same_step
from tests.models.sample import Sample, weighted_mean
from tests.semantics.steps import planned


class _Cell(nn.Module):
    """A cell that the forward steps by itself."""

    def __init__(self, cell: nn.Module, width: int) -> None:
        super().__init__()
        self.cell, self.width = cell, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, found = x.new_zeros(x.shape[1], self.width), []
        for t in x:
            hidden = self.cell(t, hidden)
            found.append(hidden)
        return torch.stack(found)


class _Layer(nn.Module):
    """The outputs of a stack."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)[0]
        return outputs


def _build(kind: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    if kind.endswith("Cell"):
        return _Cell(getattr(nn, kind)(6, width), width)
    return _Layer(nn.RNN(6, width) if kind == "RNN" else getattr(nn, kind)(6, width, 2, bias=False))


# Rows of 3 are all remainder, rows of 24 a part of the kernels' stride and some more.
@pytest.mark.parametrize(("kind", "width"), [
    ("RNN", 24), ("LSTM", 3), ("LSTM", 24), ("GRU", 24), ("GRUCell", 3), *(
        pytest.param(*row, marks=pytest.mark.slow) for row in (
            ("RNN", 3), ("GRU", 3), ("RNNCell", 3), ("RNNCell", 24), ("GRUCell", 24)))])
def test_rows_of_any_length(kind: str, width: int) -> None:
    x = torch.randn(4, 5, 6)
    sample = Sample(_build(kind, width), (x,), {}, weighted_mean(4, 5, width))
    assert_same_step(_build(kind, width), planned(sample.model, x), sample)
