"""A rewriting pass: a part of a tensor that was just written is read as what was written.

Kernels that go over a wide result tile by tile keep one buffer for the tiles, and write and read a part of
it. A trace has no writes in place: each write is a copy of the whole buffer with another part in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import Joint, owner_of
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

_EXACT = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default,
          aten.where.self, aten.maximum.default, aten.copy.default, aten._to_copy.default,
          aten.slice_scatter.default, aten.mm.default, aten.addmm.default, aten.t.default}
"""Operations whose result does not depend on how their inputs lie in memory."""


def read_what_was_written(work: Joint) -> None:
    """Parts that are read as they were written, parts that are the whole, and copies over a whole part."""
    overwritten, seen = work.overwritten(), work.results()
    for node in list(work.graph.nodes):
        if node in seen or node.op != "call_function":
            continue
        value = _written(node)
        if value is not None and value.meta[VALUE].dtype == node.meta[VALUE].dtype \
                and value.meta[VALUE].shape == node.meta[VALUE].shape \
                and value.meta[VALUE].device == node.meta[VALUE].device \
                and owner_of(value) not in overwritten and value not in work.sources \
                and (value.meta[VALUE].stride() == node.meta[VALUE].stride()
                     or all(user.target in _EXACT for user in node.users)):
            work.replace(node, value)


def _written(node: fx.Node) -> fx.Node | None:
    """What a node's value is, where it is another node's."""
    if node.target is aten.copy.default:
        return _node(node.args[1])
    if node.target is aten.slice_scatter.default:
        return _node(node.args[1])                 # where it has the shape of the whole
    if node.target is not aten.slice.Tensor:
        return None
    base = _node(node.args[0])
    if base is None or base.meta[VALUE].shape == node.meta[VALUE].shape:
        return base
    same = base.target is aten.slice_scatter.default and _place(base.args[2:]) == _place(node.args[1:])
    return _node(base.args[1]) if same else None


def _place(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dimension, begin, end and step of a part."""
    return tuple(given if given is not None else left_out
                 for given, left_out in zip((*args, *[None] * (4 - len(args))), (0, 0, None, 1), strict=True))


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
