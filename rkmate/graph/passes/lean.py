"""Rewrites of operations whose kernels hold or allocate more memory than their result needs.

An operator of the package that replaces torch's returns the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.ops.losses import CROSS_ENTROPY_BACKWARD, STORAGES_OF_THEIR_OWN
from rkmate.graph.ops.norms import BATCH_NORM_BACKWARD
from rkmate.graph.passes.joint import Joint
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import given_to, operator_name, schema_of

aten = torch.ops.aten


# -- Kernels that work part by part ----------------------------------------------------------------
#
# The tensors around a language model's loss and a network's first batch norms are often the largest of all,
# and torch's kernels allocate several of their size at once. The operators that replace them give the
# same bits with one such tensor: the one that they overwrite.

_LOSSES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def split_wide(joint: Joint) -> None:
    """Replace gradients of wide cross entropies and batch norms by operators that work part by part."""
    for node in list(joint.graph.nodes):
        new: tuple[Any, tuple[Any, ...]] | None = None
        if node.target is aten._log_softmax_backward_data.default:
            new = _cross_entropy(node)
        elif node.target is aten.native_batch_norm_backward.default:
            new = _batch_norm(node)
        if new is None:
            continue
        with joint.graph.inserting_before(node):
            chunked = joint.graph.create_node("call_function", *new, name=operator_name(new[0]))
        chunked.meta = dict(node.meta)
        joint.replace(node, chunked)
        joint.graph.erase_node(node)


def is_wide(value: Any, dim: int) -> bool:
    """Return whether a tensor is large enough to be worked on part by part along a dimension."""
    if not isinstance(value, torch.Tensor) or value.dim() <= dim:
        return False
    total = value.numel() * value.element_size()
    return total >= 2 * devices.of(value).part_bytes(total) and value.shape[dim] > 1


def _cross_entropy(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the gradients of a log-softmax and of the loss that reads it, as one operation."""
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
    """Return the gradient of a batch norm in training mode, on a CPU: on other devices, torch's has no
    waste."""
    grad, input, weight, _, _, mean, invstd, train, eps, mask = node.args
    values = [n.meta[VALUE] for n in (grad, input)]  # type: ignore[union-attr]
    if train is not True or mask != [True] * 3 or mean is None or invstd is None \
            or not is_wide(values[0], 1) or values[0].shape[2:].numel() < 2 or any(
                not (devices.of(v).cpu_kernels and v.is_contiguous()) for v in values) \
            or values[0].dtype != values[1].dtype:
        return None
    return BATCH_NORM_BACKWARD, (grad, input, weight, mean, invstd, eps)


# -- Reduced losses --------------------------------------------------------------------------------
#
# Torch's kernels of some losses compute each element's loss first and give the sum that tensor's storage: a
# number that is held to the end of the step is as large as the outputs. `F.fold` (and the gradient of
# `F.unfold`) does so on a CPU: its images hold a storage as large as the columns. So does a transposed
# convolution of volumes there that makes less than it reads.

_NO_REDUCTION = 0


def storages_of_their_own(joint: Joint) -> None:
    """Replace losses that are summed up, folds, and some transposed convolutions by operators whose result
    has a storage of its own."""
    for node in joint.graph.nodes:
        if node.target in STORAGES_OF_THEIR_OWN and _is_in_a_larger_one(node):
            node.target = STORAGES_OF_THEIR_OWN[node.target]


def _is_in_a_larger_one(node: Any) -> bool:
    """Return whether the result of an operation stands in a storage larger than its own."""
    result = node.meta[VALUE]
    if node.target is aten.col2im.default:
        return devices.of(result).cpu_kernels
    if node.target is aten.convolution.default:
        read, transposed = node.args[0].meta[VALUE], node.args[6]
        return bool(transposed) and result.dim() == 5 and result.numel() < read.numel() \
            and devices.of(result).cpu_kernels
    return not result.dim() and _reduction(node) != _NO_REDUCTION


def _reduction(node: Any) -> int:
    default = next(a.default_value for a in schema_of(node.target).arguments if a.name == "reduction")
    return int(given_to(node.target, node.args, node.kwargs).get("reduction", default))


# -- Unread statistics -----------------------------------------------------------------------------


def drop_unread_statistics(joint: Joint) -> None:
    """Drop the running statistics that a batch norm's gradient takes in training mode and does not read.

    Held until the backward, the updated ones are memory that eager mode does not need.
    """
    for node in joint.graph.nodes:
        if node.target is not aten.native_batch_norm_backward.default:
            continue
        grad, input, weight, _, _, mean, invstd, train, *rest = node.args
        # Without a weight, the kernels of GPUs take the statistics' type for the arithmetic's.
        if train is True and mean is not None and invstd is not None \
                and (weight is not None or devices.of(input.meta[VALUE]).cpu_kernels):
            node.args = (grad, input, weight, None, None, mean, invstd, train, *rest)
