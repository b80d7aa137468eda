"""Operators of losses: torch's, done part by part, or with results in storages of their own.

Each operator gives torch's bits. Operators that work on a few rows at a time can write their result over an
argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rkmate import device as devices
from rkmate.graph.ops.parts import bytes_of_part, part_bytes, rows_of
from rkmate.torch_seam.own import Gradient, Over, OwnOperator, own_operator, quickest, register
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


def _transposed_flops(input: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(math.prod(input) * math.prod(weight[1:]))


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
    replace(_in_a_storage_of_its_own(aten.convolution.default), stands_for=None, flops=_transposed_flops,
            temporaries=lambda inputs, outputs: inputs[0].nbytes),
))
CROSS_ENTROPY_BACKWARD, SCALE = own_operator("cross_entropy_backward"), own_operator("scale")
STORAGES_OF_THEIR_OWN = {theirs: own_operator(operator_name(theirs))
                         for theirs in (*_SUMMED_UP, aten.col2im.default, aten.convolution.default)}
"""Torch's operator -> the one with the same bits, whose result holds no larger storage than its own."""


# -- CTC losses ------------------------------------------------------------------------------------
#
# The CTC loss as an operation whose results have known shapes. Torch's operation returns a table as wide as
# the longest target, and a trace does not know that length; this operation receives it as an argument, and
# runs torch's kernel.


def ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
             target_lengths: torch.Tensor, blank: int, reduction: str | int, zero_infinity: bool,
             longest: int) -> torch.Tensor:
    """Compute torch's CTC loss from kernels, as torch does. `longest`: the largest of `target_lengths`."""
    batched = log_probs.dim() == 3
    log_probs = log_probs if batched else log_probs.unsqueeze(1)
    targets = targets.to(log_probs.device, torch.long)
    losses: torch.Tensor = torch.ops.rkmate.ctc_loss.default(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity, longest)[0]
    if zero_infinity:
        losses = torch.where(losses == math.inf, losses.new_zeros(()), losses)
    if reduction in ("mean", 1):
        return (losses / target_lengths.to(losses.device, losses.dtype).clamp_min(1)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def _ctc_forward(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
             target_lengths: torch.Tensor, blank: int, zero_infinity: bool, longest: int) -> Any:
    return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank,
                                           zero_infinity)


def _ctc_backward(grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor,
              input_lengths: torch.Tensor, target_lengths: torch.Tensor, losses: torch.Tensor,
              table: torch.Tensor, blank: int, zero_infinity: bool) -> Any:
    return torch.ops.aten._ctc_loss_backward.Tensor(grad, log_probs, targets, input_lengths, target_lengths,
                                                    losses, table, blank, zero_infinity)


def _fake_ctc_forward(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
                  target_lengths: torch.Tensor, blank: int, zero_infinity: bool, longest: int) -> Any:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _fake_ctc_backward(grad: torch.Tensor, log_probs: torch.Tensor, *others: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep_ctc(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    log_probs, targets, input_lengths, target_lengths, ctx.blank, ctx.zero_infinity, _ = inputs
    ctx.save_for_backward(log_probs, targets, input_lengths, target_lengths, *output)


def _differentiate_ctc(ctx: Any, grad: torch.Tensor, *others: Any) -> Any:
    found = torch.ops.rkmate.ctc_loss_backward.default(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None, None


register((
    OwnOperator("ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
                "int blank, bool zero_infinity, int longest) -> (Tensor, Tensor)", _ctc_forward,
                shape=_fake_ctc_forward, gradient=Gradient(_differentiate_ctc, _keep_ctc), reads_host=True),
    OwnOperator("ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
                "Tensor target_lengths, Tensor losses, Tensor table, int blank, bool zero_infinity) "
                "-> Tensor", _ctc_backward, shape=_fake_ctc_backward, reads_host=True),
))
