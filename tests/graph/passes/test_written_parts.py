"""Tiles of one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rkmate.graph.ops.parts import WRITE_PART
from rkmate.measure.step import measure_peak
from tests.equality import assert_same_step
from tests.graph.passes.graphs import Made, aten, run, targets
from tests.models import Sample
from tests.semantics.steps import planned


def tile(made: Made, *place: int) -> tuple[Any, Any]:
    """A product, written to a part of a buffer; and the buffer."""
    x = made.source("input", 0, 4, 4)
    product = made.call(aten.mm.default, x, x)
    buffer = made.call(aten.empty.memory_format, [4, 8])
    return product, made.call(aten.slice_scatter.default, buffer, product, *place)


def test_a_part_is_read_as_it_was_written() -> None:
    made = Made()
    _, written = tile(made, 1, 2, 6)
    z = made.call(aten.mul.Tensor, made.call(aten.slice.Tensor, written, 1, 2, 6), 2.0)
    assert targets(run("written parts", made.work([z]))) == [aten.mm.default, aten.mul.Tensor]


@pytest.mark.parametrize(("begin", "reader"), [(1, aten.mul.Tensor), (2, aten.pow.Tensor_Scalar)])
def test_another_part_and_a_reader_that_goes_row_by_row_stay(begin: int, reader: Any) -> None:
    made = Made()
    _, written = tile(made, 1, 2, 6)
    z = made.call(reader, made.call(aten.slice.Tensor, written, 1, begin, begin + 4), 3.0)
    assert aten.slice_scatter.default in targets(run("written parts", made.work([z])))


def test_what_the_caller_gets_stays() -> None:
    made = Made()
    _, written = tile(made, 1, 2, 6)
    z = made.call(aten.slice.Tensor, written, 1, 2, 6)
    assert aten.slice.Tensor in targets(run("written parts", made.work([z])))


def test_what_the_forward_overwrites_is_no_part() -> None:
    made = Made()
    b = made.source("buffer", "b", 4, 8)
    z = made.call(aten.mul.Tensor, made.call(aten.slice.Tensor, b, 1, 0, 8), 2.0)
    moved = made.call(aten.add.Tensor, b, 1)
    assert aten.slice.Tensor in targets(run("written parts", made.work([z], (), [(b, moved)])))


def nested(made: Made, whole: Any, value: Any) -> tuple[Any, Any]:
    """A value, written to two columns of the second row; and the row."""
    row = made.call(aten.slice_scatter.default, made.call(aten.select.int, whole, 0, 1), value, 0, 2, 4)
    return made.call(aten.select_scatter.default, whole, row, 0, 1), row


def test_a_part_of_a_part_is_written_once() -> None:
    made = Made()
    whole = made.call(aten.zeros.default, [4, 8])
    value = made.call(aten.neg.default, made.source("input", 0, 2))
    written, row = nested(made, whole, value)
    again = made.call(aten.slice_scatter.default, row, value, 0, 2, 4)
    again = made.call(aten.select_scatter.default, written, again, 0, 1)
    work = run("parts of parts", made.work([made.call(aten.exp.default, again)]))
    assert targets(work) == [aten.zeros.default, aten.neg.default, WRITE_PART, aten.exp.default]
    assert next(n for n in work.graph.nodes if n.target is WRITE_PART).args[2] == [2, 0, 1, 4, 0, 2, 4, 1]


def test_a_reader_of_the_part_reads_it_in_the_whole() -> None:
    made = Made()
    whole = made.call(aten.zeros.default, [4, 8])
    written, row = nested(made, whole, made.source("input", 0, 2))
    outputs = [made.call(aten.exp.default, written), made.call(aten.neg.default, row)]
    assert targets(run("parts of parts", made.work(outputs))) == [
        aten.zeros.default, WRITE_PART, aten.select.int, aten.exp.default, aten.neg.default]


@pytest.mark.parametrize("other", ["part", "whole"])
def test_parts_of_other_tensors_stay(other: str) -> None:
    made = Made()
    whole, value = made.call(aten.zeros.default, [4, 8]), made.source("input", 0, 2)
    row = made.call(aten.select.int, whole if other == "part" else made.source("input", 1, 4, 8), 0, 2)
    row = made.call(aten.slice_scatter.default, row, value, 0, 2, 4)
    z = made.call(aten.select_scatter.default, whole, row, 0, 1)
    assert WRITE_PART not in targets(run("parts of parts", made.work([z])))


class TileByTile(torch.autograd.Function):
    """Logarithms of sums of exponents of a product, over one buffer of tiles that is wider than they are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        buffer, total = torch.empty(len(x), 4096), torch.zeros(len(x))
        for start in range(0, len(weight), 6):
            part = buffer[:, :len(weight[start:start + 6])]
            torch.mm(x, weight[start:start + 6].t(), out=part)
            total += (part * 1.0).exp().sum(-1)
        return total.log()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        buffer, dx, dw = torch.empty(len(x), 4096), torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, len(weight), 6):
            part = buffer[:, :len(weight[start:start + 6])]
            torch.mm(x, weight[start:start + 6].t(), out=part)
            part.copy_((part * 1.0).exp() * grad.unsqueeze(-1))
            dx.addmm_(part, weight[start:start + 6])
            dw[start:start + 6].addmm_(part.t(), x)
        return dx, dw


class Tiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = TileByTile.apply(x, self.weight)
        return out


def test_a_kernel_that_works_tile_by_tile_takes_no_more_than_it_does_itself() -> None:
    torch.manual_seed(0)
    model, twin, x = Tiles(), Tiles(), torch.randn(8, 8)
    twin.load_state_dict(model.state_dict())
    module = planned(twin, x)
    plain = measure_peak(lambda: model(x).sum().backward()).peak
    assert module.plan.peak_bytes < plain / 4
    model.zero_grad()
    assert_same_step(model, module, Sample(model, (x,), {}, torch.sum))
