"""The CTC loss as an operation whose results have known shapes.

Torch's own returns a table as wide as the longest target: a length is a value, which a trace has not. This
one is told it. What runs is torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rkmate.torch_seam.own import Gradient, OwnOperator, register


def ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
             target_lengths: torch.Tensor, blank: int, reduction: str | int, zero_infinity: bool,
             longest: int) -> torch.Tensor:
    """As torch composes its loss of kernels. `longest`: the largest of `target_lengths`."""
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


def _forward(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
             target_lengths: torch.Tensor, blank: int, zero_infinity: bool, longest: int) -> Any:
    return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank,
                                           zero_infinity)


def _backward(grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor,
              input_lengths: torch.Tensor, target_lengths: torch.Tensor, losses: torch.Tensor,
              table: torch.Tensor, blank: int, zero_infinity: bool) -> Any:
    return torch.ops.aten._ctc_loss_backward.Tensor(grad, log_probs, targets, input_lengths, target_lengths,
                                                    losses, table, blank, zero_infinity)


def _fake_forward(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
                  target_lengths: torch.Tensor, blank: int, zero_infinity: bool, longest: int) -> Any:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _fake_backward(grad: torch.Tensor, log_probs: torch.Tensor, *others: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    log_probs, targets, input_lengths, target_lengths, ctx.blank, ctx.zero_infinity, _ = inputs
    ctx.save_for_backward(log_probs, targets, input_lengths, target_lengths, *output)


def _differentiate(ctx: Any, grad: torch.Tensor, *others: Any) -> Any:
    found = torch.ops.rkmate.ctc_loss_backward.default(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None, None


register((
    OwnOperator("ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
                "int blank, bool zero_infinity, int longest) -> (Tensor, Tensor)", _forward,
                shape=_fake_forward, gradient=Gradient(_differentiate, _keep), reads_host=True),
    OwnOperator("ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
                "Tensor target_lengths, Tensor losses, Tensor table, int blank, bool zero_infinity) "
                "-> Tensor", _backward, shape=_fake_backward, reads_host=True),
))
