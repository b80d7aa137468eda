"""Operators of batch norms: their gradients, channel by channel; their statistics over several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rkmate.graph.ops.parts import bytes_of_part, part_bytes, stretches
from rkmate.torch_seam.own import Over, OwnOperator, own_operator, register

aten = torch.ops.aten


def batch_norm_backward_over(
        grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
        save_mean: torch.Tensor, save_invstd: torch.Tensor, eps: float, *,
        out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of input, weight and bias in training mode; `out`, for the first, may be `grad_out`.

    The channels are cut. torch's own kernel allocates the first gradient twice.
    """
    if not (grad_out.is_contiguous() and input.is_contiguous() and input.shape[2:].numel() > 1):
        # Another layout goes through another kernel, whose sums are ordered otherwise.
        gradient, weights, biases = _batch_norm_backward(grad_out, input, weight, save_mean,
                                                         save_invstd, eps)
        return out.copy_(gradient), weights, biases
    parts = []
    for channels in stretches(input.shape[1], input.nbytes, part_bytes(input, input.nbytes)):
        gradient, *rest = _batch_norm_backward(
            grad_out[:, channels].contiguous(), input[:, channels].contiguous(),
            None if weight is None else weight[channels], save_mean[channels],
            save_invstd[channels], eps)
        out[:, channels].copy_(gradient)
        del gradient
        parts.append(rest)
    return out, torch.cat([w for w, _ in parts]), torch.cat([b for _, b in parts])


def batch_norm_backward(
        grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
        save_mean: torch.Tensor, save_invstd: torch.Tensor,
        eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of input, weight and bias in training mode, in memory of their own."""
    return batch_norm_backward_over(grad_out, input, weight, save_mean, save_invstd, eps,
                                    out=torch.empty_like(input))


def _batch_norm_backward(grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
                         save_mean: torch.Tensor, save_invstd: torch.Tensor,
                         eps: float) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = aten.native_batch_norm_backward.default(
        grad_out, input, weight, None, None, save_mean, save_invstd, True, eps, [True, True, True])
    return result


_BACKWARD = ("Tensor grad_out, Tensor input, Tensor? weight, Tensor save_mean, "
             "Tensor save_invstd, float eps")


def _of_parts(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes of copies of a few channels, if there are several images, and of their gradients."""
    return (2 if outputs[0].shape[0] == 1 else 4) * bytes_of_part(outputs[0], 1)


register((
    OwnOperator(
        f"batch_norm_backward({_BACKWARD}) -> (Tensor, Tensor, Tensor)", batch_norm_backward,
        in_place=Over("batch_norm_backward.over", 0, "out"),
        temporaries=_of_parts),
    OwnOperator(
        f"batch_norm_backward.over({_BACKWARD}, *, Tensor(a!) out) -> (Tensor(a!), Tensor, Tensor)",
        batch_norm_backward_over, temporaries=_of_parts),
))
BATCH_NORM_BACKWARD = own_operator("batch_norm_backward")


# -- Statistics of several ranks -------------------------------------------------------------------


def _statistics_of_ranks(input: torch.Tensor, means: torch.Tensor, invstds: torch.Tensor,
                         running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float, eps: float,
                         counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the statistics of the batches of all ranks, and the running ones that follow, which torch's
    operator overwrites without saying so in its schema."""
    running = running_mean.clone(), running_var.clone()
    found = aten.batch_norm_gather_stats_with_counts(input, means, invstds, *running, momentum, eps, counts)
    return *found, *running


register([OwnOperator(
    "statistics_of_ranks(Tensor input, Tensor means, Tensor invstds, Tensor running_mean, "
    "Tensor running_var, float momentum, float eps, Tensor counts) -> (Tensor, Tensor, Tensor, Tensor)",
    _statistics_of_ranks, shape=lambda input, means, invstds, running_mean, running_var, *others: (
        means.new_empty(means.shape[1]), means.new_empty(means.shape[1]),
        torch.empty_like(running_mean), torch.empty_like(running_var)))])
