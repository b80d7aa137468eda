"""Joint passes: what the forward overwrites (running statistics above all), and who reads it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.ops.norms import BY_GROUPS
from rkmate.graph.passes.joint import Joint, is_view
from rkmate.torch_seam.nodes import VALUE, phase_tag

aten = torch.ops.aten


def drop_unread_statistics(work: Joint) -> None:
    """A batch norm's gradient in training mode takes running statistics and reads none.

    Held until the backward, the updated ones are memory that eager mode does not need.
    """
    for node in work.graph.nodes:
        if node.target is not aten.native_batch_norm_backward.default:
            continue
        grad, input, weight, _, _, mean, invstd, train, *rest = node.args
        # Without a weight, the kernels of GPUs take the statistics' type for the arithmetic's.
        if train is True and mean is not None and invstd is not None \
                and (weight is not None or devices.of(input.meta[VALUE]).cpu_kernels):
            node.args = (grad, input, weight, None, None, mean, invstd, train, *rest)


def protect_overwritten(work: Joint) -> None:
    """Copy what the forward overwrites, for readers that need the value from before."""
    overwritten = work.overwritten()
    for node in [n for n in work.sources if n in overwritten]:
        readers = [u for u in node.users if not _is_statistics_of(u, node)]
        if all(_makes_new_value(work, u) for u in readers):
            continue
        first = next(n for n in work.graph.nodes if n.op == "call_function")
        with work.graph.inserting_before(first):
            copy = work.graph.call_function(aten.clone.default, (node,))
        copy.meta = {VALUE: node.meta[VALUE], **phase_tag(backward=False)}
        with node.meta[VALUE].fake_mode:
            copy.meta[VALUE] = torch.clone(node.meta[VALUE])
        for user in readers:
            user.replace_input_with(node, copy)


def _makes_new_value(work: Joint, user: fx.Node) -> bool:
    """Whether the result is what the forward writes, and nothing else: it is needed once, and before that."""
    return not user.users and not is_view(user) and user not in work.outputs \
        and any(n is user for _, n in work.mutations) and not any(n is user for _, n in work.grads)


def _is_statistics_of(user: fx.Node, node: fx.Node) -> bool:
    """In training mode these arguments do not enter the result: a second run is harmless."""
    args: tuple[Any, ...] = user.args
    if user.target is torch.ops.rkmate.cudnn_batch_norm.default:
        return node in args[3:5] and node not in args[:3]
    return user.target in (aten._native_batch_norm_legit_functional.default, BY_GROUPS) \
        and args[5] is True and node in args[3:5] and node not in args[:3]


def take_counters_off(work: Joint) -> None:
    """Note what integers of the caller's the forward only counts up: they are no value of the step."""
    place = {s: n for n, s in work.sources.items()}
    handed = Counter(n for n in (*work.outputs, *(n for _, n in work.grads), *(n for _, n in work.mutations)))
    kept = []
    for source, node in work.mutations:
        if _counts_up(node, place[source]) and handed[node] == 1:
            work.counters += ((source, node.args[1]),)  # type: ignore[operator]
        else:
            kept.append((source, node))
    work.mutations = tuple(kept)


def _counts_up(node: fx.Node, old: fx.Node) -> bool:
    """Whether a value is `old` and a number, and nothing else reads either."""
    return node.target is aten.add.Tensor and node.args[0] is old and len(node.args) == 2 \
        and type(node.args[1]) is int and not node.kwargs and not node.users and set(old.users) == {node} \
        and not old.meta[VALUE].is_floating_point() and not old.meta[VALUE].is_complex()
