"""Operations that torch traces with another arithmetic than eager mode's, put back on eager's.

Torch decomposes some operations in Python while it traces (resampling, shrinking, margin losses:
rounded otherwise, and one of the losses wrong), and chooses some gradients' formulas by values, which
a trace has not. While a module is captured, the first take torch's own kernels, and the second become
operations that ask eager autograd when they run.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.errors import CaptureError
from rkmate.torch_seam import schema
from rkmate.torch_seam.own import Gradient, OwnOperator, own_operator, register
from rkmate.torch_seam.schema import python_kernels_replaced
from rkmate.torch_seam.tensors import without_modes
from rkmate.torch_seam.trace import fake_operations_seen

aten = torch.ops.aten


def _product(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)


def _cumulative_product(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cumprod(x, dim)


def _layout_of_product(grad: torch.Tensor, x: torch.Tensor, dim: int | None,
                       keepdim: bool) -> torch.Tensor:
    """Return a tensor with the strides of a product with the incoming gradient, as all formulas of eager mode
    have them."""
    if dim is None or not x.dim():
        return torch.empty_like(x)
    return (grad if keepdim else grad.unsqueeze(dim)) * x


def _layout_of_cumulative_product(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(x)


def _define(name: str, arguments: str, forward: Callable[..., torch.Tensor],
            layout: Callable[..., torch.Tensor]) -> None:
    """Define an operation whose gradient is eager autograd's, found when it runs. `layout`: the gradient's
    shape and strides, on fake tensors."""

    def backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
        # In this thread: another one of autograd's may wait for a lock that this one holds.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            leaf = x.detach().requires_grad_()
            result: torch.Tensor = torch.autograd.grad(forward(leaf, *args), leaf, grad)[0]
        return result

    def save(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.args = inputs[1:]

    def gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        backward_op = own_operator(f"{name}_backward")
        return (backward_op(grad, ctx.saved_tensors[0], *ctx.args), *(None for _ in ctx.args))

    def below_autograd(x: torch.Tensor, *args: Any) -> torch.Tensor:
        with schema.below_autograd():
            return forward(x, *args)

    register((
        OwnOperator(f"{name}({arguments}) -> Tensor", below_autograd, shape=below_autograd,
                    gradient=Gradient(gradient, save)),
        OwnOperator(f"{name}_backward(Tensor grad, {arguments}) -> Tensor", backward, shape=layout,
                    uses_autograd=True),
    ))


_define("product", "Tensor x, int? dim, bool keepdim", _product, _layout_of_product)
_define("cumulative_product", "Tensor x, int dim", _cumulative_product, _layout_of_cumulative_product)

LONGEST_AT_ZERO: dict[Any, int] = {torch.ops.rkmate.product_backward.default: 1,
                                   torch.ops.rkmate.cumulative_product_backward.default: 1}
"""Gradients that are computed by one formula or another, by how many zeros a value holds. Operation ->
position of that value among its arguments. All zeros or a single one need the most temporary memory, so
that costs are measured on both."""


def _prod_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiplied(x, dtype, None, False)


def _prod_dim(x: torch.Tensor, dim: int, keepdim: bool = False, *,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiplied(x, dtype, dim, keepdim)


def _multiplied(x: torch.Tensor, dtype: torch.dtype | None, dim: int | None,
                keepdim: bool) -> torch.Tensor:
    result: torch.Tensor = torch.ops.rkmate.product(_cast(x, dtype), dim, keepdim)
    return result


def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.rkmate.cumulative_product(_cast(x, dtype), dim)
    return result


def _cast(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None and not x.is_floating_point() and not x.is_complex():
        dtype = torch.int64
    return x if dtype is None else x.to(dtype)


class _Dropout(torch.autograd.Function):
    """Dropout whose gradient is two products, as the CPU's kernel computes it.

    They keep the strides of the gradient that comes in; a trace of the kernel says contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float) -> torch.Tensor:
        result: torch.Tensor
        result, mask = aten.native_dropout(x, p, True)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0] * ctx.scale, None


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return the kernel that keeps a mask of bytes, where its rounding is that of eager mode."""
    if not train or p == 0:
        return x.clone()
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    if not devices.of(x).cpu_kernels:       # others have one kernel for it, which keeps a mask of bytes
        result: torch.Tensor = aten.native_dropout(x, p, True)[0]
        return result
    if _same_scale(p, x.dtype):
        dropped: torch.Tensor = _Dropout.apply(x, p)
        return dropped
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@functools.cache
def _same_scale(p: float, dtype: torch.dtype) -> bool:
    with without_modes():
        x = torch.linspace(1, 2, 4096, dtype=torch.float64).to(dtype)
        return torch.equal(x * torch.ones_like(x).div_(1 - p), x.clone().mul_(1 / (1 - p)))


_OWN: dict[Any, Callable[..., Any]] = {
    aten.prod.default: _prod_all, aten.prod.dim_int: _prod_dim, aten.cumprod.default: _cumprod,
    aten.dropout.default: _dropout}
_DECOMPOSED = ("softshrink", "hardshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
               *(f"{exact}{kind}" for exact in ("upsample_", "_upsample_") for kind in (
                   "nearest1d", "nearest2d", "nearest3d", "nearest_exact1d", "nearest_exact2d",
                   "nearest_exact3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d",
                   "bilinear2d_aa", "bicubic2d_aa", "lanczos2d_aa")))


def _decomposed() -> list[Any]:
    packets = [getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


@contextmanager
def as_eager_computes() -> Iterator[None]:
    """Trace eager mode's kernels while a module is captured. (Other threads that trace meanwhile see these
    kernels, too.)"""
    with python_kernels_replaced({**dict.fromkeys(_decomposed()), **_OWN}):
        yield


_CHECKS = {id(op): op for op in (aten._linalg_check_errors.default, aten._assert_async.default,
                                aten._assert_async.msg)}
"""Operators by id: torch computes an operator's hash in Python, and every operation of a trace is looked
up."""
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)


@contextmanager
def checks_by_value_refused(model: nn.Module) -> Iterator[None]:
    """Raise `CaptureError` where an operation checks the values of its result while a module is captured.

    The check of a linear solver has no result, so a graph does not show that it was there (torch 2.11 and
    2.12), or has to keep it in order with other effects (from 2.13 on). The check of a distribution is an
    assertion (from 2.15 on).
    """
    def look(func: Any, args: Any, kwargs: Any) -> None:
        if id(func) not in _CHECKS:
            return
        if func is aten._linalg_check_errors.default:
            raise CaptureError(f"{type(model).__name__} uses an operation that {CHECKS_BY_VALUE}")
        # Up to 2.14, the check of a distribution asks for a value, which stops a trace.
        if any(f.filename.startswith(_DISTRIBUTIONS) for f in traceback.extract_stack()):
            raise ValueError("data-dependent check of a distribution's arguments")

    with fake_operations_seen(look):
        yield


CHECKS_BY_VALUE = (
    "checks its result or has other effects (torch.linalg.inv, solve and cholesky do), which a plan "
    "cannot order: use the one without the check (torch.linalg.inv_ex, solve_ex, cholesky_ex)")
"""Text of an error: the operation's effect, and what to use instead."""
