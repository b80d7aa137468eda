"""Attention as a GPU of another machine would compute it.

Torch asks the device that is there which kernel attention takes, and a trace on the CPU finds the CPU's. For
a plan that is made for another device, the rules of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`
are asked here instead, and the kernel's operation is traced: what it keeps for its backward is then right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from rkmate import device as devices
from rkmate.devices import GPU
from rkmate.torch_seam.schema import python_kernels_replaced

aten = torch.ops.aten
Kernel = Literal["flash", "efficient", "cudnn", "math"]

_ATTENTION = aten.scaled_dot_product_attention.default
_HALVES = (torch.float16, torch.bfloat16)
_ALLOWED: dict[Kernel, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled, "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled, "math": torch.backends.cuda.math_sdp_enabled}


def kernel_of(gpu: GPU, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              mask: torch.Tensor | None, dropout_p: float) -> Kernel:
    """Return the kernel that torch takes on a GPU, among those that the process allows."""
    order: tuple[Kernel, ...] = ("flash", "efficient", "math")
    if gpu.capability[0] in (9, 10):
        order = ("cudnn", *order)
    for kernel in order:
        if _ALLOWED[kernel]() and _FITS[kernel](gpu, query, key, value, mask, dropout_p):
            return kernel
    return "math"


def _flash_fits(gpu: GPU, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, p: float) -> bool:
    size = q.shape[-1]
    # Consumer chips have too little shared memory for the backward of wide heads.
    narrow = gpu.capability in ((8, 6), (8, 9), (12, 0)) and q.requires_grad and size > 192 \
        and (size <= 224 or p > 0)
    return _whole(q, k, v) and gpu.capability >= (8, 0) and q.dtype in _HALVES and mask is None \
        and size == v.shape[-1] and size <= 256 and not narrow


def _efficient_fits(gpu: GPU, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, p: float) -> bool:
    types = (torch.float32, torch.float16, torch.bfloat16)[:3 if gpu.capability >= (8, 0) else 2]
    step = 4 if q.dtype is torch.float32 else 8
    return _whole(q, k, v) and q.dtype in types and q.shape[1] == k.shape[1] \
        and q.shape[-1] % step == 0 and v.shape[-1] % step == 0 \
        and not (mask is not None and mask.requires_grad and mask.shape[-1] % step)


def _cudnn_fits(gpu: GPU, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, p: float) -> bool:
    return _whole(q, k, v) and q.dtype in _HALVES and p == 0 \
        and all(t.shape[-1] % 8 == 0 and t.shape[-1] <= 256 for t in (q, v)) \
        and not (mask is not None and mask.requires_grad)


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return all(t.dim() == 4 and 0 not in t.shape and t.stride(-1) == 1 for t in (q, k, v))


_FITS: dict[Kernel, Callable[..., bool]] = {
    "flash": _flash_fits, "efficient": _efficient_fits, "cudnn": _cudnn_fits, "math": lambda *_: True}


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
               scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """Compute `scaled_dot_product_attention` with the kernel of the GPU that is planned for."""
    gpu = devices.of(query).elsewhere
    kernel = "math" if gpu is None else kernel_of(gpu, query, key, value, attn_mask, dropout_p)
    if kernel == "math":
        result: torch.Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
        return result
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if kernel == "flash":
        size = value.shape[-1]
        padded = [torch.constant_pad_nd(t, [0, -t.shape[-1] % 8]) if t.shape[-1] % 8 else t
                  for t in (query, key, value)]
        result = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale)[0]
        return result[..., :size] if size % 8 else result
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    keeps = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    if kernel == "efficient":
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
    else:
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, False, scale=scale)[0]
    return result


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as the kernels take it: added, its rows aligned, for each head."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.tensor(-math.inf, dtype=query.dtype, device=mask.device)) \
            .to(query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.constant_pad_nd(mask, [0, -length % 16])[..., :length]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


@contextmanager
def attention_of_the_device() -> Iterator[None]:
    """Capture attention for a GPU of another machine inside the context; no change for a GPU of this
    machine."""
    if devices.of("cpu").elsewhere is None:
        yield
        return
    with python_kernels_replaced({_ATTENTION: _attention}, below_autograd=True):
        yield

