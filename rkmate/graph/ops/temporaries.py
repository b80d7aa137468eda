"""Temporary memory inside of torch's operations: on the CPU as multiples of what they read and write, on GPUs
of other machines as published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkmate.graph.ops.parts import Tensors, bytes_of_copies
from rkmate.torch_seam.own import record_of

aten = torch.ops.aten

Rule = Callable[[Tensors, Tensors], int]
"""Returns bytes, given the operands and the results."""


def temporaries_of(target: Any) -> Rule | None:
    """Return the rule of an operator on the CPU; for the package's own operators, from their records."""
    record = record_of(target)
    if record is not None and record.stands_for is None:
        return record.temporaries
    theirs = target if record is None else record.stands_for
    return TABLE.get(theirs, TABLE.get(getattr(theirs, "overloadpacket", None)))


def bytes_on_gpu(target: Any, inputs: Tensors) -> int:
    """Return the temporary bytes on a GPU of another machine: the gradient of flash attention adds up the
    queries' gradient in single precision."""
    if getattr(target, "overloadpacket", None) is aten._scaled_dot_product_flash_attention_backward:
        batch, heads, length, width = inputs[1].shape
        rows = -(-length // 128) * 128
        return 4 * batch * heads * rows * (-(-width // 32) * 32 + 1)
    return 0


def _largest(times: int) -> Rule:
    """Make the rule "`times` times the largest operand"."""
    return lambda inputs, outputs: times * max((t.nbytes for t in inputs), default=0)


def _all(times: int) -> Rule:
    """Make the rule "`times` times all operands and the first result"."""
    return lambda inputs, outputs: times * (sum(t.nbytes for t in inputs) + outputs[0].nbytes)


def _promoted(inputs: Tensors, outputs: Tensors) -> int:
    """Return the bytes of operands that are cast to the result's type."""
    return sum(t.numel() * outputs[0].element_size() for t in inputs
               if t.dtype != outputs[0].dtype and t.dim())


def _masked_softmax(inputs: Tensors, outputs: Tensors) -> int:
    """Return the bytes for finding fully masked rows: a flag for each number, and a flag for each row."""
    return 2 * outputs[0].numel()


def _norm_of_columns(inputs: Tensors, outputs: Tensors) -> int:
    """Return the bytes of the sums for the weight's and the bias's gradients, in single precision or
    better."""
    return bytes_of_copies(inputs) + 2 * sum(t.numel() * max(4, t.element_size()) for t in outputs[1:])


def _exponentials(inputs: Tensors, outputs: Tensors) -> int:
    """Return the bytes for matrices of a large norm, which need the most, and of indices of the matrices."""
    return (10 if inputs[0].dim() > 2 else 12) * inputs[0].nbytes + 64 + 16 * inputs[0].shape[:-2].numel()


TABLE: dict[Any, Rule] = {
    # A loss is made for each number before it is reduced.
    aten.mse_loss: _largest(2), aten.smooth_l1_loss: _largest(2), aten.huber_loss: _largest(1),
    aten.binary_cross_entropy: _largest(1), aten.binary_cross_entropy_with_logits: _largest(2),
    aten.soft_margin_loss: _largest(1), aten.soft_margin_loss_backward: _largest(2),
    aten.native_dropout: _largest(1),
    aten._safe_softmax: _masked_softmax,
    aten.native_layer_norm: lambda inputs, outputs: bytes_of_copies(inputs),
    aten.native_layer_norm_backward: _norm_of_columns,
    aten.native_group_norm_backward: lambda inputs, outputs: 2 * 4 * inputs[0].shape[0] * inputs[0].shape[1],
    aten._native_batch_norm_legit: lambda inputs, outputs: 4 * sum(t.nbytes for t in outputs[1:]),
    aten._native_batch_norm_legit_functional: lambda inputs, outputs: 4 * sum(t.nbytes for t in outputs[1:]),
    aten._native_batch_norm_legit_no_training: lambda inputs, outputs: 4 * sum(t.nbytes for t in inputs[1:]),
    aten.native_batch_norm_backward: _largest(1),
    aten._prelu_kernel_backward: _largest(1),
    aten.embedding: lambda inputs, outputs: bytes_of_copies(inputs),
    aten.embedding_dense_backward: lambda inputs, outputs: bytes_of_copies(inputs),
    aten.add_: _promoted,
    aten.add: _promoted, aten.sub: _promoted, aten.mul: _promoted, aten.div: _promoted, aten.sum: _promoted,
    aten.abs: _promoted,
    aten.logsumexp: _all(1), aten.sort: _largest(2), aten.median: _largest(1), aten.kthvalue: _largest(3),
    aten._euclidean_dist: _all(3),
    aten.linalg_matrix_exp: _exponentials,
    aten.im2col: _largest(1), aten.col2im: _largest(1), aten.upsample_bilinear2d: _all(1),
}
