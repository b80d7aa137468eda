"""Strides of a trace for a GPU: those that its kernels return, which are others than the CPU's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from rkmate.torch_seam.patches.layouts import as_kernels_return_them
from tests.device.fake import FakeDevice

aten = torch.ops.aten
ORDERS = {"contiguous": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "turned": (1, 0, 2, 3),
          "images turned": (0, 1, 3, 2)}
"""Dimensions of an image in the order of memory."""
Operation = Callable[..., Any]


def _image(order: str, device: str) -> torch.Tensor:
    places = ORDERS[order]
    made = torch.ones([(2, 8, 4, 4)[k] for k in places], device=device)
    return made.permute([places.index(k) for k in range(4)])


def _of(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Vectors of the channels."""
    return [torch.ones(8, device=x.device) for _ in range(count)]


ONE: dict[str, Operation] = {
    "batch norm": lambda x: aten._native_batch_norm_legit_functional(x, *_of(x, 4), True, 0.1, 1e-5),
    "batch norm that is not trained": lambda x: aten._native_batch_norm_legit_no_training(
        x, *_of(x, 4), 0.1, 1e-5),
    "batch norm without statistics": lambda x: aten._native_batch_norm_legit.no_stats(
        x, *_of(x, 2), True, 0.1, 1e-5),
    "batch norm of cuDNN": lambda x: torch.ops.rkmate.cudnn_batch_norm(x, *_of(x, 4), 0.1, 1e-5),
    "log softmax": lambda x: aten._log_softmax(x, 1, False),
    "rms norm": lambda x: aten._fused_rms_norm(x, [4], x.new_ones(4), 1e-5),
    "bilinear": lambda x: aten.upsample_bilinear2d(x, [8, 8], False, None, None),
    "bicubic": lambda x: aten.upsample_bicubic2d(x, [8, 8], False, None, None),
    "maxima": lambda x: aten.max_pool2d_with_indices(x, [2, 2], [2, 2]),
    "means": lambda x: aten._adaptive_avg_pool2d(x, [2, 2]),
}
TWO: dict[str, Operation] = {
    "batch norm": lambda g, x: aten.native_batch_norm_backward(
        g, x, *_of(x, 5), True, 1e-5, [True, True, True]),
    "batch norm that is not trained": lambda g, x: aten.native_batch_norm_backward(
        g, x, *_of(x, 5), False, 1e-5, [True, True, True]),
    "glu": lambda g, x: aten.glu_backward(g[:, :4], x, 1),
    "mse": lambda g, x: aten.mse_loss_backward(g, x, x * 2, 0),
    "smooth l1": lambda g, x: aten.smooth_l1_loss_backward(g, x, x * 2, 0, 1.0),
    "huber": lambda g, x: aten.huber_loss_backward(g, x, x * 2, 0, 1.0),
    "cross entropy, forward": lambda x, y: aten.binary_cross_entropy(x, y, None, 0),
    "cross entropy, as a number": lambda x, y: aten.binary_cross_entropy(x, y, None, 1),
    "cross entropy": lambda g, x: aten.binary_cross_entropy_backward(g, x, x * 0, None, 0),
    "log softmax": lambda g, x: aten._log_softmax_backward_data(g, x, 1, torch.float32),
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "rms norm": lambda g, x: aten._fused_rms_norm_backward(
        g, x, [4], x.new_ones(2, 8, 4, 1), x.new_ones(4), [True, True]),
    "convolution": lambda g, x: aten.convolution_backward(
        g, x, x.new_ones(8, 8, 3, 3), [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
}
CASES = [*((f"{name}, forward", f, 1) for name, f in ONE.items()),
         *((f"{name}, backward", f, 2) for name, f in TWO.items())]
ON_CPU = [c for c in CASES if "cuDNN" not in c[0] and c[0] != "rms norm, backward"]
"""Those that have a kernel there."""


def _strides(operation: Operation, *orders: str, device: str = "cuda:0") -> list[Any]:
    found = operation(*(_image(o, device) for o in orders))
    return [(t.stride(), t.shape, t.dtype) for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "count"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_results_have_the_strides_of_their_kernels(operation: Operation, count: int) -> None:
    orders = list(itertools.product(ORDERS, repeat=count))
    real = [_strides(operation, *of) for of in orders]
    with as_kernels_return_them(), FakeTensorMode():
        assert [_strides(operation, *of) for of in orders] == real


@pytest.mark.parametrize(("operation", "count"), [c[1:] for c in ON_CPU], ids=[c[0] for c in ON_CPU])
def test_results_have_the_strides_of_their_kernels_on_a_cpu(operation: Operation, count: int) -> None:
    orders = list(itertools.product(("contiguous", "channels last"), repeat=count))
    real = [_strides(operation, *of, device="cpu") for of in orders]
    with as_kernels_return_them(), FakeTensorMode():
        assert [_strides(operation, *of, device="cpu") for of in orders] == real


@pytest.mark.parametrize(("operation", "orders", "on_gpu", "on_cpu"), [
    (ONE["batch norm"], ("turned",), "turned", "contiguous"),
    (ONE["bilinear"], ("channels last",), (512, 1, 64, 8), (512, 1, 64, 8)),
    (TWO["batch norm"], ("contiguous", "channels last"), "channels last", "channels last"),
    (TWO["batch norm that is not trained"], ("contiguous", "channels last"), "contiguous", "channels last"),
    (TWO["mse"], ("channels last", "channels last"), "contiguous", "contiguous"),
    (TWO["cross entropy, forward"], ("turned", "contiguous"), "turned", "turned"),
    (TWO["rms norm"], ("contiguous", "turned"), "contiguous", None)])
def test_there_is_a_table_for_each_kind_of_device(operation: Operation, orders: tuple[str, ...],
                                                  on_gpu: Any, on_cpu: Any) -> None:
    """As torch's kernels were seen to return them; nothing runs."""
    for device, expected in ((FakeDevice(), on_gpu), (nullcontext(), on_cpu)):
        if expected is None:
            continue
        with device, as_kernels_return_them(), FakeTensorMode():
            found = _strides(operation, *orders, device="cpu")[0][0]
        assert found == (_image(expected, "cpu").stride() if isinstance(expected, str) else expected)
