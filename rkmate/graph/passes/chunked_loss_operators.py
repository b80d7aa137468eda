"""A wide product and the cross entropy of its result, a few rows at a time.

Log-probabilities and the gradient of the logits then exist for a few rows only; where nobody else reads
the logits, so do they. The loss has torch's bits where the products have; the gradient of the weight is a
sum over the parts, equal to torch's up to the order of its additions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from rkmate.graph.passes.operators import part_bytes, stretches

MOST_PARTS = 16
"""More would make the products of a part small, and the sum of the weight's gradient long."""

aten = torch.ops.aten
_library = torch.library.Library("rkmate", "FRAGMENT")


def _rows(count: int, columns: int, like: torch.Tensor) -> Iterator[slice]:
    total = count * columns * like.element_size()
    return stretches(count, total, max(part_bytes(like, total), total // MOST_PARTS))


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _log_probs(logits: torch.Tensor, dtype: torch.dtype, *, ours: bool) -> torch.Tensor:
    """Of a few rows; over the logits themselves where they are `ours`."""
    if logits.dtype != dtype:
        logits, ours = logits.to(dtype), True
    out = logits if ours else torch.empty_like(logits)
    aten._log_softmax.out(logits, 1, False, out=out)
    return out


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int,
                  dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of logits [N, V] for classes [N], in `dtype`, and how many rows count: as
    ``nll_loss_forward`` returns them."""
    parts = ((rows, logits[rows], False) for rows in _rows(len(logits), logits.shape[1], logits))
    return _loss(parts, len(logits), target, reduction, ignore_index, dtype)


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                         target: torch.Tensor, reduction: int, ignore_index: int,
                         dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the logits ``x @ weight + bias``: x [N, d], weight [d, V], bias [V]."""
    parts = ((rows, _product(x[rows], weight, bias), True)
             for rows in _rows(len(x), weight.shape[1], x))
    return _loss(parts, len(x), target, reduction, ignore_index, dtype)


def _loss(parts: Iterator[tuple[slice, torch.Tensor, bool]], count: int, target: torch.Tensor,
          reduction: int, ignore_index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # torch's own kernel adds up, in its order: it finds each row's value in one of two columns.
    values = torch.zeros((count, 2), dtype=dtype, device=target.device)
    column = 1 if ignore_index == 0 else 0
    ignored = target == ignore_index
    classes = target.masked_fill(ignored, 0).unsqueeze(1)
    for rows, logits, ours in parts:
        log_probs = _log_probs(logits, dtype, ours=ours)
        values[rows, column:column + 1] = log_probs.gather(1, classes[rows])
        del logits, log_probs             # before the next ones are made
    loss, total = aten.nll_loss_forward(
        values, torch.full_like(target, column).masked_fill_(ignored, ignore_index), None, reduction,
        ignore_index)
    return loss, total


def linear_cross_entropy_backward(
        grad_output: torch.Tensor, logits: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None, target: torch.Tensor, reduction: int, ignore_index: int,
        total_weight: torch.Tensor, dtype: torch.dtype, by_columns: bool, mask: list[bool],
        into: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [N, d], of the weight as [V, d] (`by_columns`: [d, V]), of the bias as [1, V].

    `logits`: where they are in memory; else they are computed again. What `mask` does not ask for
    is empty. Sums over the parts are kept in single precision at least. `into`: what the weight's is added
    to, instead.
    """
    dx, dw, db = _gradients(x, weight, by_columns, [mask[0], mask[1] and into is None, mask[2]])
    for rows in _rows(len(x), weight.shape[1], x):
        part = _log_probs(_product(x[rows], weight, bias) if logits is None else logits[rows], dtype,
                          ours=logits is None)
        grad = aten.nll_loss_backward(grad_output if reduction else grad_output[rows], part,
                                      target[rows], None, reduction, ignore_index, total_weight)
        aten._log_softmax_backward_data.out(grad, part, 1, dtype, out=grad)
        del part
        grad = grad.to(x.dtype)
        if mask[0]:
            dx[rows] = torch.mm(grad, weight.t())
        if mask[1]:
            _add_product(dw if into is None else into,
                         *((x[rows].t(), grad) if by_columns else (grad.t(), x[rows])))
        if mask[2]:
            db += grad.sum(0, keepdim=True, dtype=db.dtype)
        del grad                          # before the next one is made
    return dx, dw.to(x.dtype), db.to(x.dtype)


def _gradients(x: torch.Tensor, weight: torch.Tensor, by_columns: bool,
               mask: list[bool]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = torch.promote_types(x.dtype, torch.float32)
    shape = weight.shape if by_columns else weight.shape[::-1]
    return (torch.empty_like(x) if mask[0] else x.new_empty(0),
            x.new_zeros(shape, dtype=sums) if mask[1] else x.new_empty(0),
            x.new_zeros((1, weight.shape[1]), dtype=sums) if mask[2] else x.new_empty(0))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b)


def add_linear_cross_entropy_gradient(
        into: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with the weight's gradient added to what stands in `into`."""
    arguments: Any = (*args, into)
    return linear_cross_entropy_backward(*arguments)


_ARGUMENTS = ("Tensor grad_output, Tensor? logits, Tensor x, Tensor weight, Tensor? bias, Tensor target, "
              "int reduction, SymInt ignore_index, Tensor total_weight, ScalarType dtype, bool by_columns, "
              "bool[] mask) -> (Tensor, Tensor, Tensor)")
_LOSS = "Tensor target, int reduction, SymInt ignore_index, ScalarType dtype) -> (Tensor, Tensor)"
for _schema, _function in {
    f"cross_entropy(Tensor logits, {_LOSS}": cross_entropy,
    f"linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, {_LOSS}": linear_cross_entropy,
    f"linear_cross_entropy_backward({_ARGUMENTS}": linear_cross_entropy_backward,
    f"add_linear_cross_entropy_gradient(Tensor(a!) into, {_ARGUMENTS}": add_linear_cross_entropy_gradient,
}.items():
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.rkmate.linear_cross_entropy)
def _flops(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * int(weight[1])


@register_flop_formula(torch.ops.rkmate.linear_cross_entropy_backward)
def _flops_backward(grad_output: Any, logits: Any, x: Any, weight: Any, *args: Any,
                    **kwargs: Any) -> int:
    products = int(sum(args[-1][:2])) + (logits is None)
    return products * 2 * int(x[0]) * int(x[1]) * int(weight[1])


@register_flop_formula(torch.ops.rkmate.add_linear_cross_entropy_gradient)
def _flops_added(into: Any, *args: Any, **kwargs: Any) -> int:
    found: int = _flops_backward(*args)
    return found
