"""Layouts that torch's fake tensors get wrong: where a kernel returns other strides than a trace says.

A trace decides by strides which copies are made, and in which order a later sum is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from rkmate import device as devices
from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.tensors import FakeTensorMode, suggest_memory_format
from rkmate.torch_seam.versions import all_off

aten = torch.ops.aten
Layout = Callable[..., torch.Tensor]
"""A tensor of the layout that a kernel's first result has: of the traced one, and of the arguments."""


def _contiguous(first: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _format_of(argument: int) -> Layout:
    return lambda first, *args: torch.empty_like(
        first, memory_format=suggest_memory_format(args[argument]))


def _strides_of(argument: int) -> Layout:
    """Return a rule: the result has the strides of an argument. A result of another shape, such as a loss's
    sum, stays unchanged."""
    return lambda first, *args: first if first.shape != args[argument].shape else \
        torch.empty_like(args[argument], dtype=first.dtype)


def _of_product_with(argument: int) -> Layout:
    return lambda first, *args: torch.empty_like(args[0] * args[argument], dtype=first.dtype)


def _of_batch_norm_gradient(first: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return the gradient with the strides of the input in training; outside of training, GPUs have one
    kernel for all layouts."""
    return _format_of(1)(first, *args) if args[7] else _contiguous(first)


# A trace says that most of them keep the strides of the value.
_LOSSES = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
           aten.huber_loss_backward.default)
_BATCH_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
                aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default)
_ON_CPU: dict[Any, Layout] = {
    **dict.fromkeys((
        aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
        aten._log_softmax_backward_data.default, aten.glu_backward.default, *_LOSSES), _contiguous),
    **dict.fromkeys(_BATCH_NORMS, _format_of(0)),
    **dict.fromkeys((
        aten.native_batch_norm_backward.default, aten.native_group_norm_backward.default),
        _format_of(1)),
    aten.binary_cross_entropy.default: _strides_of(0),
    aten.binary_cross_entropy_backward.default: _strides_of(1)}
_ON_GPUS: dict[Any, Layout] = {
    **dict.fromkeys((
        aten.glu_backward.default, aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default,
        *_LOSSES), _contiguous),
    **dict.fromkeys((
        *_BATCH_NORMS, aten._native_batch_norm_legit_no_training.default,
        aten.binary_cross_entropy.default), _strides_of(0)),
    aten.native_batch_norm_backward.default: _of_batch_norm_gradient,
    aten.binary_cross_entropy_backward.default: _strides_of(1),
    aten.upsample_bilinear2d.default: _format_of(0)}
_EVERYWHERE: dict[Any, Layout] = {
    aten.elu_backward.default: _of_product_with(5),
    **dict.fromkeys((
        aten.hardtanh_backward.default, aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default, aten.softplus_backward.default,
        aten.logit_backward.default), _of_product_with(1))}


def _as_the_kernel(trace: Callable[..., Any], on_cpu: Layout | None, on_gpus: Layout | None
                   ) -> Callable[..., Any]:
    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        here = devices.of(args[0]).cpu_kernels
        layout = on_cpu if here else on_gpus
        if layout is None and here:
            return trace(*args, **kwargs)
        # The trace of a group norm's gradient takes views that only a contiguous one has.
        result = trace(args[0].contiguous(), *args[1:], **kwargs)
        alone = isinstance(result, torch.Tensor)
        first, *others = (result,) if alone else result
        if first is not None:
            first = first if layout is None else layout(first, *args)
        return first if alone else (first, *others)
    return run


# -- Results without arithmetic --------------------------------------------------------------------
#
# Torch finds the form of a batch norm's results by tracing two dozen operations, each time anew: a third of
# the capture of a DenseNet.

Form = Callable[..., Any]
"""An operation's results, of the right shapes and types, or NotImplemented."""


def _alike(x: Any, *others: Any) -> bool:
    """Return whether tensors have the type of the first one, which no kernel changes to add up."""
    return x.dtype in (torch.float32, torch.float64) and all(o is None or o.dtype is x.dtype for o in others)


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> Any:
    if not training or not _alike(x, weight, bias, mean, var):
        return NotImplemented
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _batch_norm_without_statistics(x: Any, weight: Any, bias: Any, training: bool, *rest: Any) -> Any:
    return _batch_norm(x, weight, bias, None, None, training)


def _functional_batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    made = _batch_norm(x, weight, bias, mean, var, *rest)
    return made if made is NotImplemented else (*made, torch.empty_like(mean), torch.empty_like(var))


def _batch_norm_gradient(gradient: Any, x: Any, weight: Any, mean: Any, var: Any, save_mean: Any,
                         save_invstd: Any, training: bool, eps: float, wanted: Sequence[bool]) -> Any:
    if not training or not _alike(gradient, x, weight, save_mean, save_invstd):
        return NotImplemented
    return torch.empty_like(x), *(x.new_empty(x.shape[1]) if asked else None for asked in wanted[1:])


_FORMS: dict[Any, Form] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten._native_batch_norm_legit_functional.default: _functional_batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_gradient}


def _in_short(operation: Any, trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that traces an operation's results, or the one that knows their form without."""
    form = _FORMS.get(operation)
    if form is None:
        return trace

    @functools.wraps(trace)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = NotImplemented if kwargs else form(*args)
        return trace(*args, **kwargs) if found is NotImplemented else found
    return run


# -- Views and images ------------------------------------------------------------------------------

def strides_of_view(shape: Sequence[int], stride: Sequence[int],
                    new: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides that ``view`` gives a tensor in a new shape, as torch's `computeStride` does; None
    if it would have to copy, or if there is no element.

    For a dimension of size one, any stride is right, and fake tensors have another one than kernels. But
    whether a tensor counts as channels-last depends on this stride, and so does the kernel that runs.
    """
    if 0 in shape or not shape:
        return None
    made: list[int] = []                # from the last dimension on
    old_part = new_part = 1
    step = stride[-1]
    for d in range(len(shape) - 1, -1, -1):
        old_part *= shape[d]
        if d and (shape[d - 1] == 1 or stride[d - 1] == old_part * step):
            continue                    # in memory, this dimension goes on in the one before it
        while len(made) < len(new) and (new_part < old_part or new[-1 - len(made)] == 1):
            made.append(new_part * step)
            new_part *= new[-len(made)]
        if new_part != old_part:
            return None
        if d:
            step, old_part, new_part = stride[d - 1], 1, 1
    return tuple(reversed(made)) if len(made) == len(new) else None


def _as_views_are(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def run(a: torch.Tensor, *shape: Any, **kwargs: Any) -> Any:
        result = trace(a, *shape, **kwargs)
        if 1 not in result.shape:
            return result
        strides = strides_of_view(a.shape, a.stride(), result.shape)
        return result if strides is None or strides == result.stride() else \
            result.as_strided(result.shape, strides)
    return run


def _ambiguous(value: Any) -> bool:
    """Return whether `value` is an image whose memory format depends on the stride of a dimension of size
    one."""
    return isinstance(value, torch.Tensor) and value.dim() in (4, 5) and 1 in value.shape \
        and devices.of(value).cpu_kernels


def _with_a_number(mode: FakeTensorMode, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of an image and a number: the kernel keeps the image's strides, even if the meta
    device takes those of its memory format."""
    value, other = args[:2]
    if not _ambiguous(value) or isinstance(other, torch.Tensor):
        return NotImplemented
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    dtype = operation(meta, other, **kwargs).dtype
    strides = operation(meta, meta.new_empty(()), **kwargs).stride()
    with mode:
        return torch.empty_strided(value.shape, strides, dtype=dtype, device=value.device)


def _group_norm(mode: FakeTensorMode, operation: Any, x: Any, weight: Any, bias: Any, batch: int,
                channels: int, pixels: int, groups: int, eps: float) -> Any:
    # The kernel keeps the image's memory format. Torch 2.14 traces it as contiguous, and so do all releases
    # for some images with a dimension of size one.
    image = isinstance(x, torch.Tensor) and x.dim() in (4, 5) and devices.of(x).cpu_kernels
    if not image or any(p is not None and p.dtype is not x.dtype for p in (weight, bias)):
        return NotImplemented
    with mode:
        return (torch.empty_like(x, memory_format=suggest_memory_format(x)),
                x.new_empty((batch, groups)), x.new_empty((batch, groups)))


_OF_IMAGES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), _with_a_number),
    aten.native_group_norm.default: _group_norm}


class _Known(dict[Any, Any]):
    """Results of operations on fake tensors, by operator and arguments. Those of higher-order operators are
    left out: their keys hold ids of graphs, which live no longer than a trace."""

    def __setitem__(self, key: Any, entry: Any) -> None:
        if isinstance(key.key[0], OpOverload):
            super().__setitem__(key, entry)


_known: dict[tuple[object, ...], _Known] = {}
"""Settings of the process that results depend on -> results, which later captures find."""
_MOST_KNOWN = 5_000
"""The largest number of results that are kept, of some kilobytes each."""


@contextmanager
def _own_results() -> Iterator[None]:
    """Keep the results on fake tensors that captures find apart from those that others find."""
    settings = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.enabled,
                torch.backends.mkldnn.enabled, *all_off())
    known = _known.setdefault(settings, _Known()) if devices.all_present() else _Known()
    if len(known) > _MOST_KNOWN:
        known.clear()
    with mock.patch.object(FakeTensorMode, "cache", known):
        yield


@contextmanager
def as_kernels_return_them() -> Iterator[None]:
    """Give results the strides of the kernels while a module is captured."""
    from torch import _refs
    from torch._decomp import decomposition_table
    from torch._subclasses.fake_impls import op_implementations_dict

    on_cpu, on_gpus = {**_EVERYWHERE, **_ON_CPU}, {**_EVERYWHERE, **_ON_GPUS}
    changed = {op: _as_the_kernel(_in_short(op, decomposition_table[op]), on_cpu.get(op), on_gpus.get(op))
               for op in {**on_cpu, **on_gpus} if op in decomposition_table}
    with mock.patch.dict(decomposition_table, changed), \
            mock.patch.dict(op_implementations_dict, _OF_IMAGES), \
            mock.patch.object(_refs, "_reshape_view_helper", _as_views_are(_refs._reshape_view_helper)), \
            _own_results():
        yield

