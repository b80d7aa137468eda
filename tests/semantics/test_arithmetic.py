"""Operations one by one: a planned step computes with eager mode's kernels, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.equality import assert_same_step
from tests.models.sample import Sample
from tests.semantics.steps import planned, tightest

Operation = Callable[[torch.Tensor], torch.Tensor]
WEIGHTS = torch.rand(4, generator=torch.Generator().manual_seed(1))


class _Model(nn.Module):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.operation = nn.Conv2d(3, 4, 3, padding=1), operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(self.layer(x))


def _means(h: torch.Tensor) -> torch.Tensor:
    return h.mean((2, 3))


def _rows(h: torch.Tensor) -> torch.Tensor:
    return h.flatten(2)


def _labels() -> torch.Tensor:
    return torch.tensor([[1, 2, -1, 0], [0, -1, 1, 2]])


def _grid(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h.permute(0, 2, 3, 1)[..., :2])


# Those that torch decomposes, or differentiates by values, and so traces otherwise.
TRACED_OTHERWISE: dict[str, Operation] = {
    "bilinear": lambda h: F.interpolate(h, scale_factor=2.3, mode="bilinear"),
    "bilinear, corners": lambda h: F.interpolate(h, size=(13, 11), mode="bilinear", align_corners=True),
    "bilinear, smoothed": lambda h: F.interpolate(h, size=(5, 5), mode="bilinear", antialias=True),
    "bicubic": lambda h: F.interpolate(h, size=(13, 11), mode="bicubic"),
    "bicubic, smoothed": lambda h: F.interpolate(h, size=(5, 5), mode="bicubic", antialias=True),
    "linear": lambda h: F.interpolate(_rows(h), size=37, mode="linear"),
    "trilinear": lambda h: F.interpolate(h.view(2, 2, 2, 8, 8), size=(3, 9, 5), mode="trilinear"),
    "nearest": lambda h: F.interpolate(h, scale_factor=2),
    "nearest, exact": lambda h: F.interpolate(h, size=(13, 11), mode="nearest-exact"),
    "softshrink": lambda h: F.softshrink(h, 0.1),
    "hardshrink": F.hardshrink,
    "multilabel margin": lambda h: F.multilabel_margin_loss(_means(h), _labels()),
    "product": lambda h: h.prod(1),
    "product with zeros": lambda h: h.relu().prod(1),
    "product, kept": lambda h: h.prod(1, keepdim=True, dtype=torch.float64),
    "product of all": lambda h: h[0, 0, 0].prod(),
    "cumulated product": lambda h: h.cumprod(1),
    "cumulated product with zeros": lambda h: h.relu().cumprod(1),
    "cross entropy, smoothed, with weights, some targets ignored": lambda h: F.cross_entropy(
        h, torch.arange(128).view(2, 8, 8) * 7 % 5 - 1, WEIGHTS, ignore_index=-1, label_smoothing=0.1),
    "covariance": lambda h: h[0, 0].cov(), "correlation": lambda h: h[0, 0].corrcoef(),
    "covariance of one row": lambda h: h[0, 0, 0].cov(correction=0),
    "dropout of an odd rate": lambda h: F.dropout(h, 0.15),
    "dropout of everything": lambda h: F.dropout(h, 1.0),
    "attention dropout of an odd rate": lambda h: F.scaled_dot_product_attention(h, h, h,
                                                                                 dropout_p=0.15),
}

OTHERS: dict[str, Operation] = {
    "grid sample": lambda h: F.grid_sample(h, _grid(h), align_corners=False),
    "grid sample, bicubic": lambda h: F.grid_sample(h, _grid(h), mode="bicubic", align_corners=False),
    "group norm": lambda h: F.group_norm(h, 2),
    "instance norm": F.instance_norm,
    "rms norm": lambda h: F.rms_norm(h, (8,)),
    "local response norm": lambda h: F.local_response_norm(h, 2),
    "glu": lambda h: F.glu(h, 1),
    "mish": F.mish, "selu": F.selu, "softplus": F.softplus, "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish, "tanhshrink": F.tanhshrink, "celu": lambda h: F.celu(h, 0.7),
    "gelu, tanh": lambda h: F.gelu(h, approximate="tanh"),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "integers drawn like it": lambda h: h * torch.randint_like(h, 5),
    "cross entropy, smoothed": lambda h: F.cross_entropy(h, h.detach().argmax(1), label_smoothing=0.1),
    "kl": lambda h: F.kl_div(h.log_softmax(1), torch.full((2, 4, 8, 8), 0.25), reduction="batchmean"),
    "huber": lambda h: F.huber_loss(h, h.detach() * 2),
    "cosine similarity": lambda h: F.cosine_similarity(h, h.flip(1)),
    "distances": lambda h: torch.cdist(_rows(h), _rows(h).flip(1)),
    "norm": lambda h: h.norm(dim=1), "norm, cubic": lambda h: h.norm(p=3, dim=1),
    "std": lambda h: h.std((2, 3)),
    "logsumexp": lambda h: h.logsumexp(1), "logcumsumexp": lambda h: h.logcumsumexp(1),
    "largest of all": lambda h: h.max(), "least of all, tied": lambda h: h.relu().min(),
    "amax, tied": lambda h: h.relu().amax((1, 2)), "median": lambda h: h.median(1)[0],
    "sort": lambda h: h.sort(1)[0], "quantile": lambda h: h.quantile(0.3, 1),
    "renorm": lambda h: h.renorm(2, 1, 0.5),
    "determinant": torch.linalg.det, "singular values": torch.linalg.svdvals,
    "inverse": lambda h: torch.linalg.inv_ex(h + 3 * torch.eye(8)).inverse,
    "matrix exponential": torch.linalg.matrix_exp,
    "fourier": lambda h: torch.fft.rfft2(h).abs(),
    "short fourier": lambda h: torch.stft(h.flatten(1), 16, return_complex=True,
                                          window=torch.hann_window(16)).abs(),
    "unfold and fold": lambda h: F.fold(F.unfold(h, 3), (8, 8), 3),
    "reflected padding": lambda h: F.pad(h, (1, 1, 1, 1), mode="reflect"),
    "largest, pooled and put back": lambda h: F.max_unpool2d(
        *F.max_pool2d(h, 2, return_indices=True), 2),
    "fractional pool": lambda h: F.fractional_max_pool2d(h, 2, output_size=3),
    "transposed convolution": lambda h: F.conv_transpose2d(h, h.detach()[:, :, :3, :3].repeat(2, 1, 1, 1)),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "dropout in place": lambda h: F.dropout(h * 1, 0.15, True, inplace=True),
    "dropout of channels": lambda h: F.dropout2d(h, 0.15),
    "index": lambda h: h[:, torch.tensor([0, 2, 0])],
    "index add": lambda h: h.index_add(1, torch.tensor([0, 0]), h[:, :2]),
    "scatter": lambda h: h.scatter_add(1, torch.zeros(2, 4, 8, 8, dtype=torch.long), h.exp()),
    "scatter, largest": lambda h: h.scatter_reduce(
        1, torch.zeros(2, 4, 8, 8, dtype=torch.long), h.exp(), "amax"),
    "repeat": lambda h: h.repeat_interleave(2, 1),
    "power": lambda h: h.abs().pow(h),
    "complex": lambda h: torch.view_as_real(torch.polar(h.abs(), h)),
    "einsum": lambda h: torch.einsum("bchw,bdhw->bcd", h, h.exp()),
    "outer products": lambda h: torch.kron(h[0, 0], h[0, 1]),
    "bag of embeddings": lambda h: F.embedding_bag(torch.tensor([[0, 1], [2, 2]]), h[0, 0], mode="mean"),
    "embedding, scaled": lambda h: F.embedding(torch.tensor([0, 1, 0]), h[0, 0],
                                               scale_grad_by_freq=True),
    "attention, causal": lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "attention, grouped": lambda h: F.scaled_dot_product_attention(h, h[:, :2], h[:, :2],
                                                                   enable_gqa=True),
}


def _loss(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()


def _check(operation: Operation, wrapper: Callable[..., nn.Module]) -> None:
    model, x = _Model(operation), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    twin = copy.deepcopy(model)
    assert_same_step(twin, wrapper(model, x), Sample(model, (x,), {}, _loss), steps=1)


@pytest.mark.parametrize("name", TRACED_OTHERWISE)
def test_operations_that_torch_traces_otherwise(name: str) -> None:
    _check(TRACED_OTHERWISE[name], tightest)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_operations(name: str) -> None:
    _check(OTHERS[name], tightest)


def test_tracing_leaves_torch_as_it_was() -> None:
    kernels = dict(torch.ops.aten.upsample_bilinear2d.vec.py_kernels)
    planned(_Model(TRACED_OTHERWISE["bilinear"]), torch.randn(2, 3, 8, 8))
    assert kernels and torch.ops.aten.upsample_bilinear2d.vec.py_kernels == kernels
    assert torch._C.DispatchKey.Autograd not in torch.ops.aten.prod.dim_int.py_kernels


@pytest.mark.parametrize("checks", [lambda h: torch.linalg.lu_factor(h + 3 * torch.eye(8))[0],
                                    lambda h: torch.linalg.eig(h)[0].real])
def test_an_operation_that_raises_by_value_is_refused(checks: Any) -> None:
    with pytest.raises(rkmate.CaptureError, match=r"test_arithmetic\.py:\d+: .*lu_factor_ex"):
        planned(_Model(checks), torch.randn(2, 3, 8, 8))
