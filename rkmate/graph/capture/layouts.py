"""Layouts that torch's fake tensors get wrong: where a kernel returns other strides than a trace says.

A trace decides by strides which copies are made, and in which order a later sum is taken. Uses private
names of torch (the decompositions that fake tensors run); tested with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
Layout = Callable[..., torch.Tensor]
"""A tensor of the layout that a kernel's first result has: of the traced one, and of the arguments."""


def _contiguous(first: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _format_of(argument: int) -> Layout:
    return lambda first, *args: torch.empty_like(
        first, memory_format=suggest_memory_format(args[argument]))


def _strides_of(argument: int) -> Layout:
    return lambda first, *args: torch.empty_like(args[argument], dtype=first.dtype)


def _of_product_with(argument: int) -> Layout:
    return lambda first, *args: torch.empty_like(args[0] * args[argument], dtype=first.dtype)


# A trace says that most of them keep the strides of the value.
_ON_CPU: dict[Any, Layout] = {
    **dict.fromkeys((
        aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
        aten._log_softmax_backward_data.default, aten.glu_backward.default,
        aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default), _contiguous),
    **dict.fromkeys((
        aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default), _format_of(0)),
    **dict.fromkeys((
        aten.native_batch_norm_backward.default, aten.native_group_norm_backward.default),
        _format_of(1)),
    aten.binary_cross_entropy_backward.default: _strides_of(1)}
_EVERYWHERE: dict[Any, Layout] = {
    aten.elu_backward.default: _of_product_with(5),
    **dict.fromkeys((
        aten.hardtanh_backward.default, aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default, aten.softplus_backward.default,
        aten.logit_backward.default), _of_product_with(1))}


def _has_cpu_kernels(device: torch.device) -> bool:
    """Whether the table of the CPU's kernels holds for a device."""
    return device.type == "cpu"


def _as_the_kernel(trace: Callable[..., Any], layout: Layout, *, everywhere: bool) -> Callable[..., Any]:
    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The trace of a group norm's gradient takes views that only a contiguous one has.
        result = trace(args[0].contiguous(), *args[1:], **kwargs)
        alone = isinstance(result, torch.Tensor)
        first, *others = (result,) if alone else result
        if first is not None and (everywhere or _has_cpu_kernels(first.device)):
            first = layout(first, *args)
        return first if alone else (first, *others)
    return run


@contextmanager
def as_kernels_return_them() -> Iterator[None]:
    """While a module is captured."""
    changed = {op: _as_the_kernel(decomposition_table[op], layout, everywhere=table is _EVERYWHERE)
               for table in (_ON_CPU, _EVERYWHERE) for op, layout in table.items()
               if op in decomposition_table}
    FakeTensorMode.cache_clear()
    try:
        with mock.patch.dict(decomposition_table, changed):
            yield
    finally:
        FakeTensorMode.cache_clear()
