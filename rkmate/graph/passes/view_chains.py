"""A rewriting pass: views that only undo or repeat other views.

A traced backward looks at values through chains of reshapes and transposes, each a call at every
step. A view that is what an earlier one of its chain was becomes that one; of two reshapes in a row,
the first goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import Joint
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

_RESHAPES = {aten.view.default, aten._unsafe_view.default}
_VIEWS = _RESHAPES | {aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
                      aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}

_NO_VIEW = (RuntimeError, ValueError)
"""What views raise where only a copy has that shape; those of fake tensors have an error of their own."""


def shorten_views(work: Joint) -> None:
    """Rewrite the chains, but for what the caller gets: an output stays the view that it is."""
    outputs = {n for n in work.outputs if n is not None}
    for node in list(work.graph.nodes):
        if node.op != "call_function" or node.target not in _VIEWS or node in outputs:
            continue
        same = _earlier(node)
        if same is not None:
            work.replace(node, same)
        elif node.target in _RESHAPES and _base(node).target in _RESHAPES:
            origin = _base(_base(node))
            viewed = _viewed(origin, node)
            if viewed is not None and viewed == _layout(node.meta[VALUE]):
                node.args = (origin, *node.args[1:])


def _base(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _earlier(node: fx.Node) -> fx.Node | None:
    """The first value of a view's chain that it is once more: the same elements in the same places."""
    base = _base(node)
    if base.target not in _VIEWS and _shape(base) != _shape(node):
        return None                 # the only earlier value is another one
    wanted, found = _layout(node.meta.get(VALUE)), None
    chain: list[fx.Node] = []
    base = node
    while base.target in _VIEWS:
        chain.append(base)
        base = _base(base)
        if wanted is not None and _layout(base.meta.get(VALUE)) == wanted and _is_identity(chain, base):
            found = base
    return found


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get(VALUE), "shape", None)


def _is_identity(chain: list[fx.Node], base: fx.Node) -> bool:
    """Whether views (the last first) undo each other, whatever the strides of what they look at.

    Traced strides do not tell: another gradient may stand where one was dropped.
    """
    value = plain = torch.empty(base.meta[VALUE].shape, device="meta")
    try:
        for view in reversed(chain):
            value = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    except _NO_VIEW:
        return False
    return _layout(value) == _layout(plain)


def _viewed(origin: fx.Node, like: fx.Node) -> tuple[Any, ...] | None:
    """The layout of one value with another's shape, without a copy. (A fake tensor takes long to say it.)"""
    layout = _layout(origin.meta.get(VALUE))
    if layout is None:
        return None
    shape, stride, offset, dtype = layout
    try:
        found = torch.empty_strided(shape, stride, dtype=dtype, device="meta").view(like.meta[VALUE].shape)
    except _NO_VIEW:
        return None
    return found.shape, found.stride(), offset, dtype


def _layout(value: Any) -> tuple[Any, ...] | None:
    """What tells views of one storage apart."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype
