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
# The CPU's kernels return the input's memory format; a trace says that they keep its strides.
_FORMAT_OF: dict[Any, int] = {
    aten.native_batch_norm.default: 0, aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0, aten._native_batch_norm_legit_functional.default: 0,
    aten.native_batch_norm_backward.default: 1}
"""The argument whose memory format the first result has."""
# A trace says that they keep their input's strides.
_CONTIGUOUS = (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)
"""Whose first result is contiguous on the CPU, whatever it is given."""

# A trace says that they keep the strides of the value; the gradient's come first.
_POINTWISE = {
    aten.elu_backward.default: 5, aten.hardtanh_backward.default: 1,
    aten.hardswish_backward.default: 1, aten.hardsigmoid_backward.default: 1,
    aten.softplus_backward.default: 1}
"""Gradients whose kernel lays them out as a product of the gradient and this argument."""


def _as_the_kernel(trace: Callable[..., Any],
                   memory_format: Callable[..., torch.memory_format]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        first, *others = trace(*args, **kwargs)
        if first is not None and first.device.type == "cpu":
            first = torch.empty_like(first, memory_format=memory_format(*args))
        return first, *others
    return run


def _as_a_product(trace: Callable[..., Any], argument: int) -> Callable[..., Any]:
    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        product = args[0] * args[argument]
        return torch.empty_like(trace(*args, **kwargs)).as_strided(product.shape, product.stride())
    return run


def _format_of(argument: int) -> Callable[..., torch.memory_format]:
    return lambda *args: suggest_memory_format(args[argument])


def _contiguous(*args: Any) -> torch.memory_format:
    return torch.contiguous_format


@contextmanager
def as_kernels_return_them() -> Iterator[None]:
    """While a module is captured."""
    formats = {op: _format_of(k) for op, k in _FORMAT_OF.items()}
    formats |= dict.fromkeys(_CONTIGUOUS, _contiguous)
    changed = {op: _as_the_kernel(decomposition_table[op], of) for op, of in formats.items()
               if op in decomposition_table}
    changed |= {op: _as_a_product(decomposition_table[op], k) for op, k in _POINTWISE.items()
                if op in decomposition_table}
    FakeTensorMode.cache_clear()
    try:
        with mock.patch.dict(decomposition_table, changed):
            yield
    finally:
        FakeTensorMode.cache_clear()
