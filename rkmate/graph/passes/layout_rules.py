"""Memory layouts of images: which there are, and which operations work with any.

Kernels that are reached through a function which first makes its arguments contiguous (attention; a group
norm on an accelerator) read wrong numbers in another layout: what is not listed here keeps the layout it
had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_NAMES = (
    # Reductions, products and copies.
    "sum", "mean", "var", "var_mean", "amax", "amin", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "mm", "addmm", "bmm",
    "baddbmm", "clone", "_to_copy", "copy", "cat", "stack", "constant_pad_nd", "slice_backward",
    "select_backward", "index", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
    "new_empty", "new_full", "new_ones", "mse_loss", "nll_loss2d_forward", "nll_loss2d_backward",
    # Of images.
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "cudnn_batch_norm_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "avg_pool3d", "avg_pool3d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
    "upsample_nearest3d", "upsample_nearest3d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward")
_ANYWHERE = frozenset(getattr(aten, n) for n in _NAMES)
_ON_CPU = frozenset((aten.native_group_norm, aten.native_group_norm_backward))


def follows(node: fx.Node) -> bool:
    """Whether an operation of ATen reads images in any layout, and returns them in one of its own choice."""
    target: Any = node.target
    if torch.Tag.pointwise in target.tags:
        return bool(target.namespace == "aten")
    packet = target.overloadpacket
    return packet in _ANYWHERE or (packet in _ON_CPU and all(
        devices.of(n.meta[VALUE]).cpu_kernels for n in node.all_input_nodes))


def last_format(value: Any) -> torch.memory_format | None:
    """The layout of an image, or of a volume, that has its channels last; None for other values."""
    return _FORMATS.get(value.dim()) if isinstance(value, torch.Tensor) \
        and value.layout is torch.strided else None


def is_channels_last(value: Any) -> bool:
    """Whether an image has its channels last, and is not contiguous as well."""
    form = last_format(value)
    return form is not None and value.is_contiguous(memory_format=form) and not value.is_contiguous()


def sizes_of_small_images(graph: fx.Graph) -> frozenset[torch.Size]:
    """Heights and widths at which convolutions read more numbers of their weights than of images: to bring
    weights into another layout would take longer than the images gain. Those of one pixel have but one."""
    balance: dict[torch.Size, int] = {}
    for node in graph.nodes:
        if node.target is aten.convolution.default:
            image, weight = (n.meta[VALUE] for n in node.args[:2])
            out = node.meta[VALUE]
            moved = weight.numel() if weight.shape[2:].numel() > 1 else 0
            balance[out.shape[2:]] = balance.get(out.shape[2:], 0) + image.numel() + out.numel() - moved
    return frozenset(size for size, images in balance.items() if images < 0)


def like_in_memory(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same places: strides along dimensions of
    size one say nothing."""
    return all(n == 1 or a == b for n, a, b in zip(value.shape, value.stride(), other.stride(), strict=True))


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, and no two elements share a place."""
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride != size:
            return False
        size *= n
    return True
