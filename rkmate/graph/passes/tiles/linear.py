"""Whether a backward is linear in one incoming gradient, operation by operation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.torch_seam.own import record_of

aten = torch.ops.aten

_IN_FIRST = {getattr(aten, name) for name in (
    "_to_copy", "clone", "neg", "sum", "mean", "expand", "slice_backward", "select_backward", "cumsum",
    "nll_loss_backward", "_log_softmax_backward_data", "_softmax_backward_data", "tanh_backward",
    "sigmoid_backward", "gelu_backward", "silu_backward", "threshold_backward", "leaky_relu_backward",
    "elu_backward", "hardtanh_backward", "gather", "index", "index_select")}
"""Linear in the first operand, whatever the others are, so long as they do not depend on the gradient."""
_IN_ONE = {aten.mul, aten.mm, aten.bmm}
"""Linear in each operand."""
_TOGETHER = {aten.add, aten.sub, aten.cat}
"""Linear where all operands are."""


def is_linear(node: fx.Node, late: Collection[fx.Node]) -> bool:
    """Whether an operation's result is linear in the gradient, where its operands among `late` are."""
    args: tuple[Any, ...] = tuple(node.args)
    packet: Any = getattr(node.target, "overloadpacket", None)
    if is_zero(node):
        return True
    given = [n for n in node.all_input_nodes if n in late and not is_zero(n)]
    first = args[0] if args else None
    only_first = given == [first] and args.count(first) == 1
    record = record_of(node.target)
    if is_view(node) or packet in _IN_FIRST or (record is not None and record.linear):
        return only_first
    if packet in _IN_ONE:
        return len(given) == 1 and args.count(given[0]) == 1
    if packet is aten.div:
        return only_first
    if packet in _TOGETHER:
        operands = [n for a in args[:2] for n in (a if isinstance(a, (list, tuple)) else [a])
                    if not isinstance(n, int) or packet is not aten.cat]
        return all(isinstance(n, fx.Node) and (n in late or is_zero(n)) for n in operands)
    if packet is aten.where:
        return args[0] not in late and all(
            isinstance(n, fx.Node) and (n in late or is_zero(n)) for n in args[1:3])
    if packet in (aten.masked_fill, aten.scatter) and not isinstance(args[-1], fx.Node):
        return only_first and bool(args[-1] == 0)
    if packet in (aten.scatter, aten.scatter_add):
        return args[2] not in late and all(
            isinstance(n, fx.Node) and (n in late or is_zero(n)) for n in (first, args[3]))
    if packet is aten.constant_pad_nd:
        return only_first and (len(args) < 3 or bool(args[2] == 0))
    return False


def is_zero(node: Any) -> bool:
    """Whether a value is made of zeros."""
    if not isinstance(node, fx.Node):
        return False
    target = node.target
    if target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    if target in (aten.full.default, aten.full_like.default):
        return bool(node.args[1] == 0)
    return target is aten.scalar_tensor.default and bool(node.args[0] == 0)
