"""Operations that can write their result over an input that is not read afterwards.

Pointwise operations, and operations that write to a part of a tensor, have in-place variants with the same
arithmetic. Some kernels, and operators that work part by part, take the memory of their result as an
argument. This module says which inputs can be overwritten, and how the call is written then. The schedule
decides whether an input is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.parts import WRITES
from rkmate.graph.ops.properties import COMMUTES
from rkmate.graph.passes.node_calls import OwnFunction
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import own_operator, record_of
from rkmate.torch_seam.tensors import contiguous_strides

aten = torch.ops.aten

_UNARY = ("relu", "tanh", "sigmoid", "exp", "neg", "sqrt", "rsqrt", "abs", "silu", "gelu", "erf",
          "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "mish", "log", "log1p", "sin",
          "cos", "reciprocal", "square", "clamp", "clamp_min", "clamp_max", "bitwise_not",
          "logical_not", "triu", "tril")
_FIRST: dict[Any, Any] = {getattr(aten, n).default: getattr(aten, f"{n}_").default for n in _UNARY}
_FIRST |= {
    aten.add.Tensor: aten.add_.Tensor, aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor, aten.div.Tensor: aten.div_.Tensor,
    aten.add.Scalar: aten.add_.Scalar, aten.sub.Scalar: aten.sub_.Scalar,
    aten.mul.Scalar: aten.mul_.Scalar, aten.div.Scalar: aten.div_.Scalar,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar, aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.addcmul.default: aten.addcmul_.default, aten.addcdiv.default: aten.addcdiv_.default,
}
# Without an underscore they copy their first argument, and write to the copy.
_FIRST |= {
    aten.index_put.default: aten.index_put_.default, aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src, aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.copy.default: aten.copy_.default, aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor, **WRITES,
}
_INTO_SECOND = {aten.sub.Tensor: aten.sub.out, aten.div.Tensor: aten.div.out}
# Each element (or row) of the result depends on the same element (or row) of the gradient only.
_INTO_GRADIENT = {getattr(aten, n).default: getattr(aten, n).grad_input for n in (
    "threshold_backward", "gelu_backward", "tanh_backward", "sigmoid_backward", "silu_backward",
    "leaky_relu_backward", "elu_backward", "hardtanh_backward")}
_INTO_GRADIENT_BY_ROWS: dict[Any, tuple[Any, str]] = {
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
}
# Kernels that read a whole row before they write any of it.
_INTO_INPUT_BY_ROWS = {aten._log_softmax.default: aten._log_softmax.out,
                       aten._softmax.default: aten._softmax.out}


@dataclass(frozen=True)
class InPlace:
    """The way in which a call writes its result over one of its arguments."""

    argument: int
    """Position of the argument whose storage takes the result."""
    target: Any
    """The operator (or function) that does it."""
    swapped: bool = False
    """Whether the first two arguments change places (sums and products)."""
    keyword: str | None = None
    """The keyword under which the argument is passed once more, as the place of the result."""


def in_place_ways(node: fx.Node, storage: Callable[[fx.Node], object]) -> list[InPlace]:
    """Return the ways in which an operation could overwrite an argument.

    `storage` names where a value lives. An argument qualifies when it has the result's shape,
    strides and dtype, fills its storage, and no other argument lives there. Its strides must be what
    the kernel would give the result, too (`_plain`), and it must stand for the conjugate of its bytes only
    if the result does.
    """
    target = node.target
    result = node.meta.get(VALUE)
    record = record_of(target)
    over = None if record is None else record.in_place
    function = target if isinstance(target, OwnFunction) and target.over is not None else None
    if (over is not None or function is not None) and isinstance(result, (tuple, list)):
        result = result[0]
    if not isinstance(result, torch.Tensor):
        return []
    ways: list[InPlace] = []
    if target in _FIRST:
        ways.append(InPlace(0, _FIRST[target]))
        if target in COMMUTES and "alpha" not in node.kwargs and len(node.args) == 2:
            ways.append(InPlace(1, _FIRST[target], swapped=True))
        if target in _INTO_SECOND:
            ways.append(InPlace(1, _INTO_SECOND[target], keyword="out"))
    elif target in _INTO_GRADIENT:
        ways.append(InPlace(0, _INTO_GRADIENT[target], keyword="grad_input"))
    elif target in _INTO_GRADIENT_BY_ROWS and node.args[2] in (-1, result.dim() - 1):
        new, keyword = _INTO_GRADIENT_BY_ROWS[target]
        if node.args[3] == result.dtype:
            ways.append(InPlace(0, new, keyword=keyword))
    elif target in _INTO_INPUT_BY_ROWS and node.args[1] in (-1, result.dim() - 1) \
            and node.args[2] is False:
        ways.append(InPlace(0, _INTO_INPUT_BY_ROWS[target], keyword="out"))
    elif over is not None:
        ways.append(InPlace(over.argument, own_operator(over.name), keyword=over.keyword))
    elif function is not None:
        ways.append(InPlace(function.over, function, keyword="over"))
    return [w for w in ways if _fits(node, w, result, storage)]


def _fits(node: fx.Node, way: InPlace, result: torch.Tensor,
          storage: Callable[[fx.Node], object]) -> bool:
    argument = node.args[way.argument]
    if not isinstance(argument, fx.Node):
        return False
    value = argument.meta.get(VALUE)
    if not isinstance(value, torch.Tensor) or value.shape != result.shape \
            or value.stride() != result.stride() or not _plain(value) or value.dtype != result.dtype \
            or (value.is_conj(), value.is_neg()) != (result.is_conj(), result.is_neg()) \
            or value.untyped_storage().nbytes() != value.numel() * value.element_size() \
            or result.untyped_storage().nbytes() != value.untyped_storage().nbytes():
        return False
    if way.swapped and not isinstance(node.args[0], fx.Node):
        return False
    place = storage(argument)
    count = 0
    for other in (*node.args, *node.kwargs.values()):
        for n in other if isinstance(other, (list, tuple)) else (other,):
            count += isinstance(n, fx.Node) and storage(n) == place
    return count == 1


def _plain(value: torch.Tensor) -> bool:
    """Return whether a contiguous tensor has the strides of a new one.

    Along dimensions of size one, any stride is contiguous: a pixel of many channels may have those of
    channels-last, and a trace says that a pointwise operation keeps them. Kernels return plain ones,
    and a convolution that reads the result chooses its algorithm, and its memory, by them.
    """
    return not value.is_contiguous() or value.stride() == contiguous_strides(value.shape)
