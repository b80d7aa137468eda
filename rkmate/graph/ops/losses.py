"""Operators of losses: torch's, done part by part, or with results in storages of their own.

Each gives torch's bits. Those that work on a few rows at a time can put their result where an argument
stands.
"""

from __future__ import annotations

from typing import Any

import torch

from rkmate import device as devices
from rkmate.graph.ops.parts import bytes_of_part, part_bytes, rows_of
from rkmate.torch_seam.own import Over, OwnOperator, own_operator, quickest, register
from rkmate.torch_seam.schema import OpOverload, operator_name, schema_of

aten = torch.ops.aten
_NLL_BACKWARD = quickest(aten.nll_loss_backward.default)
_SOFTMAX_BACKWARD = quickest(aten._log_softmax_backward_data.out)
_NLL2D_BACKWARD = quickest(aten.nll_loss2d_backward.default)


def cross_entropy_backward_out(
        grad_output: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor,
        weight: torch.Tensor | None, reduction: int, ignore_index: int, total_weight: torch.Tensor,
        dim: int, *, out: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the logits; `out` may be `log_probs` itself.

    The first dimension, of `log_probs`, `target` and (without reduction) `grad_output`, is cut.
    """
    nll_backward = _NLL2D_BACKWARD if log_probs.dim() == 4 else _NLL_BACKWARD
    rows = rows_of(log_probs.shape[0], log_probs.nbytes, part_bytes(log_probs, log_probs.nbytes))
    kept, targets = log_probs.split(rows), target.split(rows)
    grads = [grad_output] * len(kept) if reduction else grad_output.split(rows)
    over = kept if out is log_probs else out.split(rows)
    for grad, part, wanted, into in zip(grads, kept, targets, over, strict=True):
        _SOFTMAX_BACKWARD(nll_backward(grad, part, wanted, weight, reduction, ignore_index, total_weight),
                          part, dim, part.dtype, out=into)
    return out


def cross_entropy_backward(
        grad_output: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor,
        weight: torch.Tensor | None, reduction: int, ignore_index: int, total_weight: torch.Tensor,
        dim: int) -> torch.Tensor:
    """Compute the gradient of the logits into a new tensor."""
    return cross_entropy_backward_out(grad_output, log_probs, target, weight, reduction,
                                      ignore_index, total_weight, dim,
                                      out=torch.empty_like(log_probs))


def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return a gradient for an incoming gradient of one, times the one that came."""
    return x * by


def scale_over(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Scale in place. On the CPU, reading `by` needs no synchronisation, so a factor of one is skipped."""
    return x if devices.of(by).host and by.item() == 1 else x.mul_(by)


def _in_a_storage_of_its_own(theirs: OpOverload) -> OwnOperator:
    """Return an operator of torch's whose result does not hold the storage of what it has summed up."""

    def alone(*args: Any) -> torch.Tensor:
        result: torch.Tensor = theirs(*args).clone()
        return result

    return OwnOperator(str(schema_of(theirs)).removeprefix("aten::"), alone, stands_for=theirs)


_CROSS_ENTROPY = ("Tensor grad_output, Tensor log_probs, Tensor target, Tensor? weight, "
                  "int reduction, SymInt ignore_index, Tensor total_weight, int dim")
_SUMMED_UP = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default,
              aten.soft_margin_loss.default)

register((
    OwnOperator(
        f"cross_entropy_backward({_CROSS_ENTROPY}) -> Tensor", cross_entropy_backward,
        in_place=Over("cross_entropy_backward.out", 1, "out"),
        temporaries=lambda inputs, outputs: bytes_of_part(outputs[0], 0),
        rows_like=aten.nll_loss_backward.default, linear=True),
    OwnOperator(
        f"cross_entropy_backward.out({_CROSS_ENTROPY}, *, Tensor(a!) out) -> Tensor(a!)",
        cross_entropy_backward_out, direct=True,
        temporaries=lambda inputs, outputs: bytes_of_part(outputs[0], 0), linear=True),
    OwnOperator("scale(Tensor x, Tensor by) -> Tensor", scale, in_place=Over("scale_", 0)),
    OwnOperator("scale_(Tensor(a!) x, Tensor by) -> Tensor(a!)", scale_over),
    *map(_in_a_storage_of_its_own, (*_SUMMED_UP, aten.col2im.default)),
))
CROSS_ENTROPY_BACKWARD, SCALE = own_operator("cross_entropy_backward"), own_operator("scale")
STORAGES_OF_THEIR_OWN = {theirs: own_operator(operator_name(theirs))
                         for theirs in (*_SUMMED_UP, aten.col2im.default)}
"""Torch's operator -> the one with the same bits, whose result holds no larger storage than its own."""
