"""A rewriting pass: wide operations of the backward become ones that work part by part.

The tensors around a language model's loss and a network's first batch norms are often the largest
of all, and torch's kernels allocate several of their size at once. The operators that take their
place give the same bits with one such tensor: the one that they overwrite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.ops.losses import CROSS_ENTROPY_BACKWARD
from rkmate.graph.ops.norms import BATCH_NORM_BACKWARD
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import operator_name

aten = torch.ops.aten

_LOSSES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


@dataclass(frozen=True)
class Alternative:
    """Another kernel of an operation that works part by part: fewer and larger parts, more memory."""

    target: Any
    """The operator."""
    args: tuple[Any, ...]
    overhead: int
    """Bytes of temporary memory, at most."""


def split_wide(graph: fx.Graph, replace: Callable[[fx.Node, fx.Node], None]) -> None:
    """Rewrite what is wide enough to be worth it. `replace` lets everything read another node."""
    for node in list(graph.nodes):
        new: tuple[Any, tuple[Any, ...]] | None = None
        if node.target is aten._log_softmax_backward_data.default:
            new = _cross_entropy(node)
        elif node.target is aten.native_batch_norm_backward.default:
            new = _batch_norm(node)
        if new is None:
            continue
        with graph.inserting_before(node):
            chunked = graph.create_node("call_function", *new, name=operator_name(new[0]))
        chunked.meta = dict(node.meta)
        replace(node, chunked)
        graph.erase_node(node)


def is_wide(value: Any, dim: int) -> bool:
    """Whether a tensor is large enough to be worked on part by part along a dimension."""
    if not isinstance(value, torch.Tensor) or value.dim() <= dim:
        return False
    total = value.numel() * value.element_size()
    return total >= 2 * devices.of(value).part_bytes(total) and value.shape[dim] > 1


def _cross_entropy(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The gradients of a log-softmax and of the loss that reads it, as one."""
    grad, log_probs, dim, dtype = node.args
    if not isinstance(grad, fx.Node) or grad.target not in _LOSSES or set(grad.users) != {node} \
            or grad.args[1] is not log_probs or not isinstance(log_probs, fx.Node):
        return None
    value = log_probs.meta[VALUE]
    if not is_wide(value, 0) or dim in (0, -value.dim()) or dtype != value.dtype \
            or not value.is_contiguous():
        return None
    return CROSS_ENTROPY_BACKWARD, (grad.args[0], log_probs, *grad.args[2:], dim)


def _batch_norm(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The gradient of a batch norm in training mode, on a CPU: elsewhere, torch's has no waste."""
    grad, input, weight, _, _, mean, invstd, train, eps, mask = node.args
    values = [n.meta[VALUE] for n in (grad, input)]  # type: ignore[union-attr]
    if train is not True or mask != [True] * 3 or mean is None or invstd is None \
            or not is_wide(values[0], 1) or values[0].shape[2:].numel() < 2 or any(
                not (devices.of(v).cpu_kernels and v.is_contiguous()) for v in values) \
            or values[0].dtype != values[1].dtype:
        return None
    return BATCH_NORM_BACKWARD, (grad, input, weight, mean, invstd, eps)


def whole_batch_norm(node: fx.Node) -> tuple[Alternative, ...]:
    """Torch's call for the gradients of a batch norm, with the same bits: it allocates the first of them
    twice, and overwrites nothing."""
    grad, input, weight, mean, invstd, eps = node.args
    value = input.meta[VALUE]  # type: ignore[union-attr]
    return (Alternative(aten.native_batch_norm_backward.default,
                        (grad, input, weight, None, None, mean, invstd, True, eps, [True] * 3),
                        value.numel() * value.element_size()),)
