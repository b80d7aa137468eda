"""Recurrent layers compute with eager mode's arithmetic, bit for bit, whatever rows they go over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rkmate.measure.step import measure_peak
from rkmate.torch_seam.patches.recurrent_steps import stepwise
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
    ("RNN", 3), ("RNN", 24), ("LSTM", 3), ("LSTM", 24), ("GRU", 3), ("GRU", 24), ("GRUCell", 3), *(
        pytest.param(*row, marks=pytest.mark.slow) for row in (
            ("RNNCell", 3), ("RNNCell", 24), ("GRUCell", 24)))])
def test_rows_of_any_length(kind: str, width: int) -> None:
    x = torch.randn(4, 5, 6)
    sample = Sample(_build(kind, width), (x,), {}, weighted_mean(4, 5, width))
    assert_same_step(_build(kind, width), planned(sample.model, x), sample)


class _States(nn.Module):
    """A stack that begins with a state, and its outputs and last states together."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer: nn.RNNBase = getattr(nn, kind)(6, 9, **options)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        outputs, last = self.layer(x, state)
        return torch.cat([outputs.flatten(), last.flatten()])


@pytest.mark.parametrize(("kind", "options", "dtype"), [
    ("GRU", {"bidirectional": True, "batch_first": True}, torch.float32),
    ("GRU", {"num_layers": 2, "dropout": 0.3}, torch.float32),
    ("GRU", {"bias": False, "batch_first": True}, torch.bfloat16),
    ("RNN", {"nonlinearity": "relu", "bidirectional": True}, torch.float64)])
def test_a_layer_is_one_operation(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = _States(kind, **options).to(dtype)
    calls = model.layer.num_layers * (2 if model.layer.bidirectional else 1)
    x = torch.randn(5, 4, 6, dtype=dtype)
    state = torch.randn(calls, x.shape[0 if model.layer.batch_first else 1], 9, dtype=dtype,
                        requires_grad=True)
    wrapped = planned(model, x, state)
    assert wrapped.source.count("recurrent_steps(") == calls
    found = []
    for run in (model, wrapped):
        torch.manual_seed(1)
        y = run(x, state)
        found.append([y, *torch.autograd.grad(y.sin().sum(), [state, *model.parameters()])])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("kind", "place"), [
    (nn.GRU, "weight_ih_l0"), (nn.LSTM, "weight_ih_l0"), (nn.GRU, "weight_hh_l0_reverse")])
def test_a_weight_with_two_places(kind: type[nn.RNNBase], place: str) -> None:
    model = _Layer(kind(6, 6, bidirectional="reverse" in place))
    model.layer.weight_hh_l0 = getattr(model.layer, place)
    x, found = torch.randn(5, 4, 6), []
    for run in (model, planned(model, x)):
        found.append(torch.autograd.grad(run(x).sin().sum(), [*model.parameters()]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("op", "layer"), [
    (torch.ops.aten.gru.input, nn.GRU(6, 9, bidirectional=True)),
    (torch.ops.aten.rnn_tanh.input, nn.RNN(6, 9))], ids=["GRU", "RNN"])
def test_a_layer_has_second_derivatives(op: Any, layer: nn.RNNBase) -> None:
    layer.double()
    weights = [w for of_layer in layer.all_weights for w in of_layer]
    x = torch.randn(7, 4, 6, dtype=torch.float64, requires_grad=True)
    hx, found = x.new_zeros(2 if layer.bidirectional else 1, 4, 9), []
    for run in (layer, lambda x, hx: stepwise(op, x, hx, weights, True, True, layer.bidirectional)):
        of_x, = torch.autograd.grad(run(x, hx)[0].sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(of_x.square().sum(), [x, *weights]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


class _Squares(_Layer):
    """The mean of a layer's squared outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize(("kind", "batch_first"), [("GRU", True), ("GRU", False), ("RNN", True)])
def test_a_step_of_a_layer_takes_what_is_counted(kind: str, batch_first: bool) -> None:
    model, x = _Squares(getattr(nn, kind)(64, 96, batch_first=batch_first)), torch.randn(32, 48, 64)
    wrapped = planned(model, x)
    wrapped(x).backward()
    wrapped.zero_grad(set_to_none=False)
    peak = measure_peak(lambda: wrapped(x).backward()).peak
    assert 0.9 * wrapped.plan.peak_bytes < peak <= wrapped.plan.peak_bytes
