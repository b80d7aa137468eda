"""A rewriting pass: batch norms of many pixels whose channels lie side by side, on a CPU.

Torch's kernel adds up a channel's pixels one after the other there, in the type of the image. Over tens of
thousands of pixels its statistics are some fifty times less exact than those of its kernel for contiguous
images, and what is near zero before a ReLU comes out on the other side more often. The operator
that takes their place adds up groups of pixels.
"""

from __future__ import annotations

import torch

from rkmate import device as devices
from rkmate.graph.ops.norms import BY_GROUPS
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.layout_rules import is_channels_last
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

LEAST_PIXELS = 4096
"""Of a channel: fewer are added up exactly enough."""


def add_up_by_groups(work: Joint) -> None:
    """Let batch norms in training mode that keep running statistics add up their pixels by groups, where
    images were given this layout: one of the caller's own choice has the bits of torch's kernel."""
    for node in work.graph.nodes:
        if node.target is aten._native_batch_norm_legit_functional.default and node.args[5] is True \
                and _has_many_pixels(node.args[0].meta[VALUE]):
            node.target = BY_GROUPS


def _has_many_pixels(image: torch.Tensor) -> bool:
    return image.dtype is torch.float32 and devices.of(image).cpu_kernels and is_channels_last(image) \
        and image.numel() >= LEAST_PIXELS * image.shape[1]
