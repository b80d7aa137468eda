"""A rewriting pass, and its operator: batch norms of many pixels whose channels lie side by side, on a CPU.

Torch's kernel adds up a channel's pixels one after the other there, in the type of the image. Over tens of
thousands of pixels its statistics are some fifty times less exact than those of its kernel for contiguous
images, and what is near zero before a ReLU comes out on the other side more often. Here a channel's pixels
are dealt out to groups, and the groups' statistics put together.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rkmate import device as devices
from rkmate.device.quick_code import quickest
from rkmate.graph.passes.joint import Rewriting
from rkmate.graph.passes.layout_rules import is_channels_last
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten
_library = torch.library.Library("rkmate", "FRAGMENT")
_update_stats = quickest(aten.batch_norm_update_stats.default)
_no_training = quickest(aten._native_batch_norm_legit_no_training.default)

LEAST_PIXELS = 4096
"""Of a channel: fewer are added up exactly enough."""
_GROUP = 1024
"""So many pixels are added up one after the other, at most."""


@functools.cache
def groups_of(pixels: int) -> int:
    """The fewest groups that all have the same number of pixels, and not too many of them."""
    return next(n for n in range(-(-pixels // _GROUP), pixels + 1) if pixels % n == 0)


def statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel of a dense image that has its channels last.

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
    """What ``aten._native_batch_norm_legit_functional`` returns, in training mode."""
    assert training
    mean, variance = statistics(input)
    out, *_ = _no_training(input, weight, bias, mean, variance, momentum, eps)
    pixels = input.numel() // input.shape[1]
    return (out, mean, (variance + eps).rsqrt_(), running_mean.lerp(mean, momentum),
            running_var.lerp(variance.mul_(pixels / (pixels - 1)), momentum))


def _shapes(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
            running_mean: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(input), *(torch.empty_like(running_mean) for _ in range(4))


_library.define(
    "batch_norm_by_groups(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
    "Tensor running_var, bool training, float momentum, float eps) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.impl("batch_norm_by_groups", batch_norm_by_groups, "CPU")
_library.impl("batch_norm_by_groups", _shapes, "Meta")
BY_GROUPS = torch.ops.rkmate.batch_norm_by_groups.default


def add_up_by_groups(work: Rewriting) -> None:
    """Let batch norms in training mode that keep running statistics add up their pixels by groups, where
    images were given this layout: one of the caller's own choice has the bits of torch's kernel."""
    for node in work.graph.nodes if work.choices.channels_last else ():
        if node.target is aten._native_batch_norm_legit_functional.default and node.args[5] is True \
                and _has_many_pixels(node.args[0].meta[VALUE]):
            node.target = BY_GROUPS


def _has_many_pixels(image: torch.Tensor) -> bool:
    return image.dtype is torch.float32 and devices.of(image).cpu_kernels and is_channels_last(image) \
        and image.numel() >= LEAST_PIXELS * image.shape[1]
