"""Results written over an input that dies: their strides are those that the kernel would have given."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample, weighted_mean
from tests.semantics.steps import planned


class _Block(nn.Module):
    """Convolves each channel by itself, and mixes them as the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.down(F.gelu(self.up(self.each(x).permute(0, 2, 3, 1))))
        total: torch.Tensor = x + mixed.permute(0, 3, 1, 2)
        return total


@pytest.mark.parametrize("pixels", [1, 2])
def test_the_sum_of_two_memory_formats(pixels: int) -> None:
    """At one pixel both formats are contiguous, and the sum has the strides of a new tensor, whatever
    it is written over; with others, the next convolution takes twenty times the memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), _Block(64), _Block(64))
    x = torch.randn(2, 3, pixels + 2, pixels + 2)
    sample = Sample(model, (x,), {}, weighted_mean(2, 64, pixels, pixels))
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, sample)
    peak = measured_peak(module, sample)
    assert peak <= module.plan.budget_bytes
    assert abs(module.plan.peak_bytes - peak) <= 0.02 * peak


@pytest.mark.parametrize(("name", "read"), [
    ("index_put", lambda table, i: table[i]),
    ("index_add", lambda table, i: table.index_select(0, i.flatten()).view(*i.shape, -1)),
    ("scatter_add", lambda table, i: table.gather(0, i.flatten()[:, None].expand(-1, 16)).view(*i.shape, -1)),
])
def test_the_gradient_of_a_table_that_is_indexed(
        name: str, read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """It is written over the zeros that it begins from: one matrix of that size, as in eager mode."""
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Parameter(torch.randn(4000, 16)), nn.Linear(16, 16)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(read(self.table, i))).square().mean()

    torch.manual_seed(0)
    model = Table()
    sample = Sample(model, (torch.randint(0, 9, (4, 6)),), {}, lambda loss: loss)
    module = planned(copy.deepcopy(model), *sample.args)
    assert re.search(rf"\.{name}_[.(]", module.source)
    assert_same_step(model, module, sample)
    assert measured_peak(module, sample) <= module.plan.peak_bytes < 1.2 * model.table.nbytes


def test_a_difference_is_written_over_its_second_operand() -> None:
    """In the backward of a product of reflections, each of two matrices: eager mode subtracts in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(192, 8)), nn.Tanh(), nn.Linear(8, 3))
    sample = Sample(model, (torch.randn(8, 192),), {}, weighted_mean(8, 3))
    module = planned(copy.deepcopy(model), *sample.args)
    assert_same_step(model, module, sample)
    assert measured_peak(module, sample) <= min(module.plan.peak_bytes, measured_peak(model, sample))


class _Filled(nn.Module):
    """Fills a matrix part by part: columns, rows, stretches of columns, or the diagonals of a batch."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.up, self.each = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        made = torch.zeros(8, len(x)) if self.part == "rows" else torch.zeros(len(x), 8)
        if self.part == "diagonals":
            made = torch.zeros(len(x), 8, 2)
        for i, layer in enumerate(self.each):
            value = torch.sin(layer(h))
            if self.part == "columns":
                made[:, i] = value.squeeze(1)
            elif self.part == "rows":
                made[i] = value.squeeze(1)
            elif self.part == "stretches":
                made[:, i:i + 1].copy_(value)
            else:
                made.diagonal(i // 4, 1, 2).add_(value)
        return made.sin().square().mean()


@pytest.mark.parametrize("part", ["columns", "rows", "stretches", "diagonals"])
def test_a_tensor_that_is_filled_part_by_part(part: str) -> None:
    """Each part is written to the tensor itself, in the forward and in the backward, as in eager mode."""
    torch.manual_seed(0)
    model = _Filled(part)
    sample = Sample(model, (torch.randn(2048, 8),), {}, lambda loss: loss)
    module = planned(copy.deepcopy(model), *sample.args)
    assert re.search(r"_scatter_\(.*# in place", module.source)
    plain = measured_peak(model, sample)
    model.zero_grad()
    assert_same_step(model, module, sample)
    assert measured_peak(module, sample) <= plain


class _Nested(nn.Module):
    """Changes a part of a part of a tensor in each step of a loop."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.up, self.each, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        out = torch.zeros_like(h) if self.part == "filled" else h.clone()
        for t in range(5):
            p = torch.tanh(self.each(h[:, t]))
            if self.part in ("added", "filled"):
                out[:, t, :2] += p[:, :2]
            elif self.part == "multiplied":
                out[:, t, :2] *= p[:, :2]
            elif self.part == "three":
                out[:, 2 * t:2 * t + 2, :8][:, 0, :2] += p[:, :2]
            elif self.part == "steps":
                out[:, ::2, 1::3][:, t] -= p[:, 1::3]
            elif self.part == "diagonals":
                out[:, t:t + 8].diagonal(0, 1, 2)[:, t] += p[:, 0]
            else:
                row = out[:, t]
                row[:, :2] += p[:, :2]
                out = out + row.sigmoid().mean()
        return self.last(out).square().mean()


@pytest.mark.parametrize("part", ["added", "filled", "multiplied", "three", "steps", "diagonals", "read"])
def test_a_part_of_a_part_that_is_changed_in_place(part: str) -> None:
    """No copy of a part is made, which would take as many bytes as the whole; nor do gradients of the layer
    that the loop uses wait for one another."""
    torch.manual_seed(0)
    model = _Nested(part)
    sample = Sample(model, (torch.randn(8, 24, 16),), {}, lambda loss: loss)
    module = planned(copy.deepcopy(model), *sample.args)
    assert re.search(r"write_part_\(", module.source)
    plain = measured_peak(model, sample)
    model.zero_grad()
    assert_same_step(model, module, sample)
    assert measured_peak(module, sample) <= 1.03 * plain
