"""Operators of products: convolutions' gradients that are added where others stand.

A convolution's weight gradient is computed a few channels at a time, so that no second tensor
of the weight's size exists next to the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from rkmate.graph.ops.parts import Tensors, part_bytes, stretches
from rkmate.torch_seam.own import OwnOperator, own_operator, register

aten = torch.ops.aten


def add_convolution_gradient(
        into: torch.Tensor, into_bias: torch.Tensor | None, grad_output: torch.Tensor, input: torch.Tensor,
        weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
        transposed: bool, output_padding: Sequence[int], groups: int) -> None:
    """Add the gradients of a convolution's weight and bias to what stands there.

    The weight's first dimension is cut: it is that of the output's channels, or, transposed, of the input's.
    Torch's kernel allocates what it returns twice.
    """
    for rows in weight_parts(weight, groups):
        whole = rows == slice(0, weight.shape[0])
        g = grad_output if transposed or whole else grad_output[:, rows]
        x = input[:, rows] if transposed and not whole else input
        last = rows.stop == weight.shape[0]
        bias = into_bias is not None and (not transposed or last)
        _, of_weight, of_bias = aten.convolution_backward.default(
            g, x, weight[rows], [g.shape[1]] if bias else None, stride, padding, dilation, transposed,
            output_padding, groups, [False, True, bias])
        into[rows].add_(of_weight)
        del of_weight                     # before the next one is made
        if into_bias is not None and bias:
            (into_bias if transposed else into_bias[rows]).add_(of_bias)


def weight_parts(weight: torch.Tensor, groups: int) -> list[slice]:
    """Return stretches of a convolution's weight, along its first dimension, whose gradients are made one by
    one."""
    rows = weight.shape[0]
    if groups != 1:
        return [slice(0, rows)]
    total = weight.numel() * weight.element_size()
    return list(stretches(rows, total, part_bytes(weight, total)))


def _convolution_flops(into: Any, into_bias: Any, grad_output: Any, input: Any, weight: Any, stride: Any,
                       padding: Any, dilation: Any, transposed: bool, *args: Any, **kwargs: Any) -> int:
    return 2 * int(math.prod(input if transposed else grad_output) * math.prod(weight[1:]))


def _part_of_weight(inputs: Tensors, outputs: Tensors) -> int:
    """Return the gradient of a part of a convolution's weight, and the channels that it is computed from."""
    part, whole = part_bytes(outputs[0], outputs[0].nbytes), outputs[0].nbytes
    read = max(t.nbytes for t in inputs if t.shape != outputs[0].shape)
    return whole if part >= whole else part + -int(-read * part // whole)


@register_flop_formula([aten.addmm_, aten.baddbmm_, aten.addbmm_])
def _product_flops(into: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(math.prod(a) * b[-1])


register((
    OwnOperator(
        "add_convolution_gradient(Tensor(a!) into, Tensor(b!)? into_bias, Tensor grad_output, Tensor input, "
        "Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
        "SymInt[] output_padding, SymInt groups) -> ()", add_convolution_gradient,
        temporaries=_part_of_weight, flops=_convolution_flops),
))
ADD_CONVOLUTION_GRADIENT = own_operator("add_convolution_gradient")
