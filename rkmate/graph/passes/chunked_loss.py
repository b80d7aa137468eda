"""A rewriting pass: chunked linear cross-entropy. The last product of a classifier and the cross entropy
of its logits, a few rows at a time.

For budgets that nothing else meets: the logits of a language model are often its largest tensors. The
gradients are exact, but the weight's is added up in another order, so that its last bits differ.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.chunked_kernels import Alternative, is_wide
from rkmate.graph.passes.chunked_loss_operators import FEWER_PARTS, part_temporaries, parts_of
from rkmate.graph.passes.joint import Rewriting

aten = torch.ops.aten
own = torch.ops.rkmate

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@dataclass
class LinearLoss:
    """A product whose cross entropy is the loss, as recognised: nodes of the forward, then of the
    backward."""

    product: fx.Node
    """``mm(x, weight)`` or ``addmm(bias, x, weight)``: [N, V]."""
    loss: fx.Node
    """The nll_loss_forward."""
    gradient: fx.Node
    """The cross_entropy_backward."""
    of_x: fx.Node | None = None
    of_weight: fx.Node | None = None
    by_columns: bool = False
    of_bias: fx.Node | None = None

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """x, weight and bias of the product."""
        args: tuple[Any, ...] = self.product.args
        return (args[0], args[1], None) if self.product.target is aten.mm.default \
            else (args[1], args[2], args[0])

    @property
    def weight(self) -> fx.Node:
        """The value whose storage the weight is."""
        node: fx.Node = self.arguments[1]
        while node.target in (aten.t.default, aten._to_copy.default):
            node = node.args[0]  # type: ignore[assignment]
        return node


def chunk_linear_losses(work: Rewriting) -> None:
    """Note the linear losses that are wide enough to be worth it; rewrite them where that is asked for."""
    found = [loss for loss in map(_linear_loss, work.graph.nodes) if loss is not None]
    work.linear_losses = tuple(work.name(loss.weight) for loss in found)
    if work.chunked_loss:
        results = work.results()
        for loss in found:
            _rewrite(work, loss, seen=_is_read_elsewhere(loss, results))


def _linear_loss(node: fx.Node) -> LinearLoss | None:
    """The linear loss that a cross entropy's gradient belongs to; None for any other node."""
    if node.target is not own.cross_entropy_backward.default:
        return None
    _, log_probs, _, weight, _, _, total, _ = tuple[Any, ...](node.args)
    loss = total.args[0]
    if weight is not None or set(log_probs.users) != {loss, node} \
            or loss.target is not aten.nll_loss_forward.default or loss.args[0] is not log_probs \
            or log_probs.target is not aten._log_softmax.default \
            or log_probs.meta["val"].dim() != 2 or not is_wide(log_probs.meta["val"], 0):
        return None
    logits: Any = log_probs.args[0]
    if isinstance(logits, fx.Node) and _is_conversion(logits):
        logits = logits.args[0]
    product: Any = logits
    while isinstance(product, fx.Node) and product.target in _VIEWS:
        product = product.args[0]
    if not isinstance(product, fx.Node) or product.kwargs \
            or product.target not in (aten.mm.default, aten.addmm.default) \
            or product.meta["val"].shape != log_probs.meta["val"].shape \
            or any(not n.meta["val"].is_contiguous() for n in (product, logits)):
        return None
    found = LinearLoss(product, loss, node)
    if product.target is aten.addmm.default and found.arguments[2].meta["val"].dim() != 1:
        return None
    return found if all(_is_gradient(found, *pair) for pair in _readers(node)) else None


def _is_conversion(node: fx.Node) -> bool:
    """Whether only the dtype changes."""
    if node.target is not aten._to_copy.default or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return bool(before.device == after.device and before.stride() == after.stride())


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads the gradient of the logits through views and conversions, and the value it reads."""
    for user in node.users:
        if user.target in _VIEWS or _is_conversion(user):
            yield from _readers(user)
        else:
            yield node, user


def _is_gradient(loss: LinearLoss, value: fx.Node, user: fx.Node) -> bool:
    """Whether a reader is one of the three gradients; it is noted."""
    x = loss.arguments[0]
    if value.meta["val"].shape != loss.product.meta["val"].shape \
            or value.meta["val"].dtype != loss.product.meta["val"].dtype:
        return False
    if user.target is aten.sum.dim_IntList and user.args[1:] == ([0], True) and not user.kwargs:
        loss.of_bias, found = user, loss.of_bias
        return found is None and loss.arguments[2] is not None
    if user.target is aten.t.default:
        products = list(user.users)
        if len(products) != 1 or products[0].target is not aten.mm.default \
                or products[0].args != (user, x):
            return False
        loss.of_weight, found = products[0], loss.of_weight
        return found is None
    if user.target is not aten.mm.default:
        return False
    if user.args[0] is value and _is_transposed(user.args[1], loss.arguments[1]):
        loss.of_x, found = user, loss.of_x
        return found is None
    if user.args[1] is value and _is_transposed(user.args[0], x):
        loss.of_weight, found, loss.by_columns = user, loss.of_weight, True
        return found is None
    return False


def _is_transposed(node: Any, of: fx.Node) -> bool:
    """Whether a matrix is another one's transpose: of the same storage, rows and columns changed."""
    def base(n: fx.Node) -> tuple[fx.Node, int]:
        turns = 0
        while n.target is aten.t.default:
            n, turns = n.args[0], turns + 1  # type: ignore[assignment]
        return n, turns % 2
    if not isinstance(node, fx.Node):
        return False
    (a, turned_a), (b, turned_b) = base(node), base(of)
    return a is b and turned_a != turned_b


def _is_read_elsewhere(loss: LinearLoss, results: set[fx.Node]) -> bool:
    """Whether the logits are there anyway: returned, or read by something beside the loss."""
    log_probs = loss.gradient.args[1]
    todo = [loss.product]
    while todo:
        node = todo.pop()
        if node in results:
            return True
        for user in node.users:
            if user.target in _VIEWS:
                todo.append(user)
            elif user is not log_probs and user is not log_probs.args[0]:  # type: ignore[union-attr]
                return True
    return False


def _rewrite(work: Rewriting, found: LinearLoss, *, seen: bool) -> None:
    graph = work.graph
    x, weight, bias = found.arguments
    grad, log_probs, target, _, reduction, ignore, total, _ = found.gradient.args
    dtype = log_probs.meta["val"].dtype  # type: ignore[union-attr]
    parts = parts_of(len(x.meta["val"]), weight.meta["val"].shape[1], x.meta["val"])
    logits: fx.Node | None = None
    with graph.inserting_before(found.loss):
        if seen:
            logits = found.product
            forward = graph.call_function(own.cross_entropy.default,
                                          (logits, target, reduction, ignore, dtype))
        else:
            forward = graph.call_function(own.linear_cross_entropy.default,
                                          (x, weight, bias, target, reduction, ignore, dtype, parts))
    forward.meta = dict(found.loss.meta)
    work.replace(found.loss, forward)
    gradients = (found.of_x, found.of_weight, found.of_bias)
    with graph.inserting_before(found.gradient):
        backward = graph.call_function(own.linear_cross_entropy_backward.default, (
            grad, logits, x, weight, bias, target, reduction, ignore, total, dtype, found.by_columns,
            [n is not None for n in gradients], parts))
        empty = x.meta["val"].new_empty
        with x.meta["val"].fake_mode:
            values = tuple(empty(0) if n is None else torch.empty_like(n.meta["val"]) for n in gradients)
        backward.meta = dict(found.gradient.meta) | {"val": values}
        for k, old in enumerate(gradients):
            if old is not None:
                new = graph.call_function(operator.getitem, (backward, k))
                new.meta = dict(old.meta) | {"val": values[k]}
                work.replace(old, new)


def fewer_parts(node: fx.Node) -> tuple[Alternative, ...]:
    """The same operation in fewer parts, of which each is at least twice as large as the one before."""
    found: list[Alternative] = []
    least: Any = node.args[-1]
    for parts in FEWER_PARTS:
        if 2 * parts <= least:
            found.append(Alternative(node.target, (*node.args[:-1], parts), temporaries(node, parts)))
            least = parts
    return tuple(found)


def temporaries(node: fx.Node, parts: int | None = None) -> int:
    """Bytes that such an operation takes beside its results, at most; in as many parts as it says unless
    given."""
    backward = node.target is own.linear_cross_entropy_backward.default
    args: tuple[Any, ...] = node.args
    x, weight, dtype = (args[k] for k in ((2, 3, 9) if backward else (0, 1, 6)))
    return part_temporaries(x.meta["val"], weight.meta["val"].shape[1], dtype,
                            args[-1] if parts is None else parts, backward=backward)
