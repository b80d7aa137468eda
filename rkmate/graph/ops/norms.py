"""Operators of batch norms: their gradients, channel by channel; their statistics, of groups of pixels.

Torch's kernel adds up a channel's pixels one after the other where channels lie side by side, in the type of
the image. Over tens of thousands of pixels its statistics are about fifty times less exact than those of its
kernel for contiguous images. Here a channel's pixels are dealt out to groups, and the groups' statistics put
together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from rkmate.graph.ops.parts import bytes_of_part, part_bytes, stretches
from rkmate.torch_seam.own import Over, OwnOperator, own_operator, quickest, register

aten = torch.ops.aten
_update_stats = quickest(aten.batch_norm_update_stats.default)
_no_training = quickest(aten._native_batch_norm_legit_no_training.default)

_GROUP = 1024
"""At most this number of pixels is added up one after another."""


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


@functools.cache
def groups_of(pixels: int) -> int:
    """Return the fewest groups that all have the same number of pixels, and not too many of them."""
    return next(n for n in range(-(-pixels // _GROUP), pixels + 1) if pixels % n == 0)


def statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the biased variance of each channel of a dense image with channels last.

    A pixel's neighbours are taken for further channels, so that one call of torch's kernel has a mean and a
    variance for each group; the variance of all is the mean of theirs and the variance of their means.
    """
    channels = input.shape[1]
    pixels = input.numel() // channels
    groups = groups_of(pixels)
    wide = groups * channels
    means, variances = _update_stats(input.as_strided((pixels // groups, wide, 1, 1), (wide, 1, wide, wide)),
                                     None, None, 0.0)
    between, mean = torch.var_mean(means.view(groups, channels), 0, correction=0)
    return mean, variances.view(groups, channels).mean(0).add_(between)


def batch_norm_by_groups(
        input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
        running_mean: torch.Tensor, running_var: torch.Tensor, training: bool, momentum: float,
        eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``aten._native_batch_norm_legit_functional`` in training mode."""
    assert training
    mean, variance = statistics(input)
    out, *_ = _no_training(input, weight, bias, mean, variance, momentum, eps)
    pixels = input.numel() // input.shape[1]
    return (out, mean, (variance + eps).rsqrt_(), running_mean.lerp(mean, momentum),
            running_var.lerp(variance.mul_(pixels / (pixels - 1)), momentum))


def _shapes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
            running_mean: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(input), *(torch.empty_like(running_mean) for _ in range(4))


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
    OwnOperator(
        "batch_norm_by_groups(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
        "Tensor running_var, bool training, float momentum, float eps) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)", batch_norm_by_groups, "CPU", shape=_shapes,
        temporaries=lambda inputs, outputs: outputs[1].nbytes),
))
BATCH_NORM_BACKWARD = own_operator("batch_norm_backward")
BY_GROUPS = own_operator("batch_norm_by_groups")


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
