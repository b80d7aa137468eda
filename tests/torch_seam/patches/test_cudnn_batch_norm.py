"""Batch norms are cuDNN's where eager mode's are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

import rkmate
from rkmate.graph.capture.capture import capture
from rkmate.torch_seam.patches import cudnn_batch_norm
from rkmate.torch_seam.patches.cudnn_batch_norm import batch_norms_as_eager_chooses
from tests.graph.passes.graphs import Made

aten = torch.ops.aten
own = torch.ops.rkmate


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where cuDNN takes them."""
    monkeypatch.setattr(cudnn_batch_norm, "is_cudnns", lambda x, weight, *rest: weight is not None)
    monkeypatch.setattr(cudnn_batch_norm, "reserve_bytes", lambda x: 16)


def _graph(*, train: bool = True, weighted: bool = True) -> tuple[Made, fx.Node, fx.Node]:
    """A graph with a batch norm; that, and its gradient, of the input alone."""
    made = Made()
    x, grad = made.source("input", 0, 4, 3, 5, 5), made.source("tangent", 0, 4, 3, 5, 5)
    weight = made.source("param", "w", 3) if weighted else None
    mean, var = made.source("buffer", "mean", 3), made.source("buffer", "var", 3)
    norm = made.call(aten._native_batch_norm_legit_functional.default, x, weight, None, mean, var, train,
                     0.1, 1e-5)
    y, saved_mean, saved_invstd, new_mean, new_var = (made.item(norm, k) for k in range(5))
    back = made.call(aten.native_batch_norm_backward.default, grad, x, weight, new_mean, new_var, saved_mean,
                     saved_invstd, train, 1e-5, [True, False, False], backward=True)
    made.graph.output((y, made.item(back, 0, backward=True)))
    return made, norm, back


@pytest.mark.usefixtures("on_gpu")
def test_a_batch_norm_and_its_gradient_are_taken() -> None:
    made, norm, back = _graph()
    x, grad, weight, mean, var = made.sources
    batch_norms_as_eager_chooses(made.graph)
    made.graph.lint()
    assert norm.target is own.cudnn_batch_norm.default
    assert norm.args == (x, weight, None, mean, var, 0.1, 1e-5)
    assert back.target is aten.cudnn_batch_norm_backward.default
    *rest, reserve = back.args
    saved = [next(u for u in norm.users if u.args[1] == k) for k in (1, 2)]
    assert rest == [x, grad, weight, None, None, *saved, 1e-5]
    assert isinstance(reserve, fx.Node)
    assert reserve.args == (norm, 5)
    assert reserve.meta["val"].nbytes == 16
    assert reserve.meta["partitioner_tag"] == "is_forward"
    assert [tuple(v.shape) for v in back.meta["val"]] == [(4, 3, 5, 5), (3,), (3,)]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("train", "weighted"), [(False, True), (True, False)])
def test_others_stay(train: bool, weighted: bool) -> None:
    made, norm, back = _graph(train=train, weighted=weighted)
    batch_norms_as_eager_chooses(made.graph)
    assert norm.target is aten._native_batch_norm_legit_functional.default
    assert back.target is aten.native_batch_norm_backward.default


def test_a_cpu_has_none_of_cudnn() -> None:
    _, norm, _ = _graph()
    batch_norms_as_eager_chooses(norm.graph)
    assert norm.target is aten._native_batch_norm_legit_functional.default


@pytest.mark.gpu
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_eager_modes_kernels_run(form: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda()
    model = model.to(memory_format=form)
    x = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=form)
    targets = [n.target for n in capture(model, (x,), {}).graph.nodes]
    assert own.cudnn_batch_norm.default in targets
    assert aten.cudnn_batch_norm_backward.default in targets
    wrapped = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, settings=rkmate.Settings(costs="analytic"),
                          progress=False)
    y = wrapped(x)
    y.sum().backward()
    assert y.stride() == model(x).stride()
    assert not [n for n, p in wrapped.named_parameters() if p.grad is None]


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_bfloat16_is_left_to_torch(weight: torch.dtype) -> None:
    x = torch.ones(2, 8, 4, 4, device="cuda", dtype=torch.bfloat16)
    vectors = [torch.ones(8, device="cuda", dtype=weight) for _ in range(4)]
    chosen = nn.functional.batch_norm(x.requires_grad_(), *vectors[2:], *vectors[:2], True).grad_fn
    assert cudnn_batch_norm.is_cudnns(x, *vectors, True, 0.1, 1e-5) == ("Cudnn" in type(chosen).__name__)
