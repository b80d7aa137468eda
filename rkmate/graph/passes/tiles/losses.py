"""Losses whose sum is taken apart from their rows: each row's own loss, and what they are divided by.

torch's `nll_loss_forward` returns the reduced loss and the weight of all rows, which depends on the classes
alone: known before any row's loss is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import Joint
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten
_NONE, _MEAN = 0, 1
_IGNORE = -100


def by_rows(work: Joint, loss: fx.Node) -> Callable[[], None]:
    """Write an `nll_loss_forward` as each row's loss and their reduction; returns what writes it as it was.

    Where classes have no weights, torch's own kernel adds the rows up in its own order: it finds each one's
    value as the score of the only class.
    """
    scores, target, weight, reduction, ignore = loss.args
    value = scores.meta[VALUE]  # type: ignore[union-attr]
    meta = {k: v for k, v in loss.meta.items() if k != VALUE}
    graph = work.graph

    def call(target_: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target_, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta[VALUE])
        with value.fake_mode:
            node.meta = meta | {VALUE: target_(*given, **named)}
        return node

    with graph.inserting_before(loss):
        counted = call(aten.ne.Scalar, target, ignore)
        if weight is None:
            total = call(aten._to_copy.default, call(aten.sum.default, counted), dtype=value.dtype)
        else:
            known = call(aten.masked_fill.Scalar, target, call(aten.bitwise_not.default, counted), 0)
            each = call(aten.index.Tensor, weight, [known])
            zero = call(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device)
            total = call(aten.sum.default, call(aten.where.self, counted, each, zero))
        rows = call(operator.getitem, call(aten.nll_loss_forward.default, scores, target, weight, _NONE,
                                           ignore), 0)
        if reduction == _NONE:
            reduced = rows
        elif weight is None:
            only = call(aten.unsqueeze.default, call(aten.neg.default, rows), 1)
            classes = call(aten.masked_fill.Scalar, call(aten.zeros_like.default, target),
                           call(aten.bitwise_not.default, counted), _IGNORE)
            reduced = call(operator.getitem, call(aten.nll_loss_forward.default, only, classes, None,
                                                  reduction, _IGNORE), 0)
        else:
            reduced = call(aten.sum.default, rows)
            if reduction == _MEAN:
                reduced = call(aten.div.Tensor, reduced, total)
    before: Any = (loss.target, loss.args, loss.kwargs)
    about = dict(loss.meta)
    items: dict[Any, dict[str, Any]] = {}
    for user in list(loss.users):
        items[user.args[1]] = dict(user.meta)
        work.replace(user, reduced if user.args[1] == 0 else total)
        graph.erase_node(user)
    graph.erase_node(loss)

    def undo() -> None:
        with graph.inserting_before(counted):
            again = graph.call_function(*before)
            again.meta = about
            for k, of_item in items.items():
                item = graph.call_function(operator.getitem, (again, k))
                item.meta = of_item
                work.replace(reduced if k == 0 else total, item)

    return undo
