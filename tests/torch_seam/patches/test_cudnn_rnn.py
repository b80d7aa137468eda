"""Recurrent stacks are cuDNN's where eager mode's are, each as one operation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import rkmate
from rkmate.graph.capture.capture import capture
from rkmate.torch_seam.patches import cudnn_rnn, recurrent
from rkmate.torch_seam.patches.cudnn_rnn import is_cudnns, whole_weights
from rkmate.torch_seam.patches.recurrent import _layer_by_layer

aten = torch.ops.aten
own = torch.ops.rkmate


def _given(kind: str, **options: Any) -> tuple[nn.RNNBase, torch.Tensor, Any]:
    model: nn.RNNBase = getattr(nn, kind)(6, 8, 2, **options)
    x = torch.ones(3, 5, 6)
    state = torch.zeros(4 if model.bidirectional else 2, 5 if not model.batch_first else 3, 8)
    return model, x, (state, state.clone()) if kind == "LSTM" else state


def _traced(monkeypatch: pytest.MonkeyPatch, kind: str, **options: Any) -> list[Any]:
    """The operations of a step that cuDNN takes."""
    monkeypatch.setattr(recurrent, "is_cudnns", lambda x, tensors: True)
    monkeypatch.setattr(cudnn_rnn, "reserve_bytes", lambda of, batch, length: 64)
    model, x, hidden = _given(kind, **options)
    op = getattr(aten, kind.lower()).input

    def step(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        zeros = x.new_zeros(hidden[0].shape if kind == "LSTM" else hidden.shape)
        y, *states = _layer_by_layer(op, x, (zeros, zeros) if kind == "LSTM" else zeros, list(weights), True,
                                     2, model.dropout, True, model.bidirectional, model.batch_first)
        assert y.shape == (3, 5, 16 if model.bidirectional else 8)
        assert all(s.shape == zeros.shape for s in states)
        return torch.autograd.grad(y.sum(), (x, *weights))

    given = [x.requires_grad_(), *model._flat_weights]
    program = make_fx(step, tracing_mode="fake")(*given)
    results = next(n for n in program.graph.nodes if n.op == "output").args[0]
    assert [tuple(n.meta["val"].shape) for n in results] == [tuple(t.shape) for t in given]
    return [n.target for n in program.graph.nodes if getattr(n.target, "namespace", "") == "rkmate"
            or n.target is aten.native_dropout.default]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"batch_first": True}])
def test_a_stack_is_one_operation(monkeypatch: pytest.MonkeyPatch, kind: str, options: Any) -> None:
    assert _traced(monkeypatch, kind, **options) == [own.cudnn_rnn.default, own.cudnn_rnn_backward.default]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_stack_with_dropout_is_one_for_each_layer(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = _traced(monkeypatch, kind, dropout=0.5)
    assert found.count(own.cudnn_rnn.default) == found.count(own.cudnn_rnn_backward.default) == 2


def test_a_cpu_has_none_of_cudnn() -> None:
    model, x, _ = _given("GRU")
    assert not is_cudnns(x, model._flat_weights)


def _of(weights: list[torch.Tensor]) -> Any:
    return cudnn_rnn._stack(torch.ones(1, 1, 3), weights, torch.ones(1, 1, 2), None, 3, 1, False, True, False)


def test_weights_that_stand_together_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_rnn, "_laid_out", lambda of: ((0, 6), 10))
    flat = torch.arange(12.0)
    together = [flat[1:7].view(2, 3), flat[7:11].view(2, 2)]
    whole = whole_weights(_of(together), together)
    assert whole.data_ptr() == flat[1:].data_ptr()
    assert whole.tolist() == list(range(1, 11))


@pytest.mark.parametrize("places", [(1, 8), (1, 7)])
def test_others_are_copied_into_one(monkeypatch: pytest.MonkeyPatch, places: tuple[int, int]) -> None:
    monkeypatch.setattr(cudnn_rnn, "_laid_out", lambda of: ((0, 6), 10))
    flat = torch.arange(12.0)
    apart = [flat[places[0]:places[0] + 6].view(2, 3), flat[places[1]:places[1] + 4].view(2, 2)]
    if places == (1, 7):
        apart[1] = apart[1].clone()
    versions = [w._version for w in apart]
    whole = whole_weights(_of(apart), apart)
    assert whole.tolist() == [v for w in apart for v in w.flatten().tolist()]
    assert whole.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
    assert [w._version for w in apart] == versions


def test_what_lies_between_weights_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_rnn, "_laid_out", lambda of: ((9, 1), 20))
    weights = [torch.arange(8.0).view(2, 4), torch.arange(8.0, 14.0).view(3, 2).t()]
    whole = whole_weights(_of(weights), weights)
    assert whole.shape == (20,)
    assert whole[9:17].equal(weights[0].flatten()) and whole[1:7].equal(weights[1].flatten())


def test_autocast_hands_over_float16() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), FakeTensorMode():
        found = cudnn_rnn.as_autocast_gives_them([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    assert [t.dtype for t in found] == [torch.float16, torch.float64]


class _Tagged(nn.Module):
    """A stack, and one number for each step of a sequence."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(6, 8, 2, **options)
        self.out = nn.Linear(self.rnn(torch.ones(1, 1, 6))[0].shape[-1], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.rnn(x)[0])
        return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"batch_first": True}, {"bias": False},
                                     {"dropout": 0.5}])
def test_cudnn_runs_on_a_gpu(kind: str, options: Any) -> None:
    model, x = _Tagged(kind, **options).cuda(), torch.ones(3, 5, 6, device="cuda")
    targets = [n.target for n in capture(model, (x,), {}).graph.nodes]
    count = 2 if options.get("dropout") else 1
    assert targets.count(own.cudnn_rnn.default) == targets.count(own.cudnn_rnn_backward.default) == count
    wrapped = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0,
                          settings=rkmate.Settings(costs="analytic", run=rkmate.RunSettings(verify=False)),
                          progress=False)
    wrapped(x).sum().backward()
    assert not [n for n, p in wrapped.named_parameters() if p.grad is None]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_cudnn_reads_and_keeps_what_it_does_in_eager_mode(kind: str) -> None:
    model, x, hidden = _given(kind)
    model, x = model.cuda(), x.cuda()
    hx, cx = ((t.cuda() for t in hidden) if kind == "LSTM" else (hidden.cuda(), None))
    chosen: Any = model(x)[0].grad_fn
    assert type(chosen).__name__ == "CudnnRnnBackward0"
    weights = [w.detach() for w in model._flat_weights]
    of = cudnn_rnn._stack(x, weights, hx, cx, cudnn_rnn.MODES[getattr(aten, kind.lower()).input], 2, False,
                          True, False)
    assert whole_weights(of, weights).data_ptr() == chosen._saved_result4.data_ptr()
    assert whole_weights(of, weights).shape == chosen._saved_result4.shape
    assert cudnn_rnn.reserve_bytes(of, 5, 3) == chosen._saved_result3.nbytes
