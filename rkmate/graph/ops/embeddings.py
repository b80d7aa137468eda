"""Operators of embeddings' gradients, which are added to another gradient of the weight row by row.

Torch makes the gradient of an embedding as large as its table, with zeros for all the words that did not
occur. The operators add up what there is of each word.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rkmate.graph.ops.parts import bytes_of_copies
from rkmate.torch_seam.own import Over, OwnOperator, own_operator, register

aten = torch.ops.aten

SORTING, PLACES = 48, 16
"""Bytes for each index: while the indices are put in order, at most, and of what comes out."""


def bytes_of_rows(grad: torch.Tensor, indices: torch.Tensor) -> int:
    """Return the most bytes that the operator takes in addition to its result: a row for each index."""
    count = indices.numel()
    rows = (count + 1) * grad.shape[-1] * grad.element_size()
    copied = 0 if grad.is_contiguous() else grad.nbytes
    return max(SORTING * count, rows + copied + PLACES * count)


def add_embedding_rows_over(total: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor,
                            padding_idx: int, *, out: torch.Tensor) -> torch.Tensor:
    """Compute ``total + embedding_dense_backward(grad, indices)``; `out` may be `total` itself.

    total [V, d], grad [..., d], indices [...]; rows of `padding_idx` are left out. No size depends on
    which indices there are: memory is the same in every step, and an accelerator is not waited for.
    """
    rows, slots = _slots(indices, padding_idx)
    count = len(rows)
    sums = aten.embedding_dense_backward(grad, slots, count + 1, count, False)
    torch.add(total, 0, out=out)         # as a sum with a zero does it: of -0.0 it makes 0.0
    return out.index_add_(0, rows, sums[:count])


def _slots(indices: torch.Tensor, padding_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the different indices, smallest first, zeros after them; and for each index its place among
    them, one past the last for `padding_idx`.

    In the indices' own order, so that kernels that sort add up in the same order.
    """
    values, order = indices.reshape(-1).sort(stable=True)
    rank = torch.zeros_like(order)
    torch.cumsum(values[1:] != values[:-1], 0, out=rank[1:])
    rows = torch.zeros_like(values).scatter_(0, rank, values)
    slots = torch.empty_like(order).scatter_(0, order, rank).view(indices.shape)
    return rows, slots.masked_fill_(indices == padding_idx, len(rows))


def add_embedding_rows(total: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor,
                       padding_idx: int) -> torch.Tensor:
    """Compute ``total + embedding_dense_backward(grad, indices)`` into a new tensor."""
    return add_embedding_rows_over(total, grad, indices, padding_idx, out=torch.empty_like(total))


def add_embedding_gradient(into: torch.Tensor, grad_output: torch.Tensor, indices: torch.Tensor,
                           padding_idx: int) -> None:
    """Add the rows of an output's gradient to those rows of the weight's that they were read from; that of
    `padding_idx` stays as it is (negative: there is none)."""
    row = into[padding_idx].clone() if padding_idx >= 0 else None
    into.index_add_(0, indices.reshape(-1), grad_output.reshape(-1, into.shape[1]))
    if row is not None:
        into[padding_idx] = row


def _flops(into: Any, grad_output: Any, *args: Any, **kwargs: Any) -> int:
    return int(math.prod(grad_output))


_ARGUMENTS = "Tensor total, Tensor grad, Tensor indices, SymInt padding_idx"

register((
    OwnOperator(
        f"add_embedding_rows({_ARGUMENTS}) -> Tensor", add_embedding_rows,
        in_place=Over("add_embedding_rows.out", 0, "out"),
        temporaries=lambda inputs, outputs: bytes_of_rows(*inputs[1:3])),
    OwnOperator(
        f"add_embedding_rows.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)", add_embedding_rows_over,
        temporaries=lambda inputs, outputs: bytes_of_rows(*inputs[1:3])),
    OwnOperator(
        "add_embedding_gradient(Tensor(a!) into, Tensor grad_output, Tensor indices, SymInt padding_idx) "
        "-> ()", add_embedding_gradient, flops=_flops,
        temporaries=lambda inputs, outputs: bytes_of_copies(inputs[1:2]) + outputs[0][:1].nbytes),
))
ADD_ROWS = own_operator("add_embedding_rows")
ADD_EMBEDDING_GRADIENT = own_operator("add_embedding_gradient")
