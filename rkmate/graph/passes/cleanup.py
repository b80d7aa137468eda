"""Rewrites that remove superfluous nodes of a trace: dead code, copies, views that undo views, and copies of
whole buffers of which only a part is read or written."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.parts import PARTS, WRITE_PART, WRITES, step_to_part
from rkmate.graph.ops.properties import ALIASES, COPIES, RESHAPES, SQUEEZES, TURNS, is_random
from rkmate.graph.passes.joint import Joint, adds, owner_of
from rkmate.torch_seam.nodes import VALUE, is_backward

aten = torch.ops.aten


# -- Dead code -------------------------------------------------------------------------------------


def drop_dead(joint: Joint) -> None:
    """Drop operations whose result nobody reads, among them assertions on metadata, which hold for every call
    of the same signature. Draws of the forward stay, as the generator's state moves on."""
    keep = joint.handed()
    todo = [n for n in joint.graph.nodes if not n.users and n.op == "call_function"]
    while todo:
        node = todo.pop()
        if node in keep or adds(node) or (is_random(node) and not is_backward(node)):
            continue
        read = node.all_input_nodes
        joint.graph.erase_node(node)
        todo += [n for n in read if not n.users and n.op == "call_function"]


# -- Copies that copy nothing ----------------------------------------------------------------------

_ALIASES = (*ALIASES, aten.lift_fresh.default)


def drop_copies_of_outputs(joint: Joint) -> None:
    """Drop the copies that capture put on the outputs; they may change layout without harm.

    Those of what the forward overwrites stay: the caller gets the value from before.
    """
    overwritten = joint.overwritten()
    for node in dict.fromkeys(joint.outputs):
        if node is None or node.target is not aten.clone.default or node.users:
            continue
        base: fx.Node = node.args[0]  # type: ignore[assignment]
        if owner_of(base) not in overwritten:
            joint.replace(node, base)
            joint.graph.erase_node(node)


def drop_copies(joint: Joint) -> None:
    """Replace aliases, and copies whose layout is that of their input, by their input.

    Both stay where both can be seen by the caller, who may write to one of them.
    """
    overwritten = joint.overwritten()
    for node in list(joint.graph.nodes):
        if node.op != "call_function":
            continue
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node):
            continue
        same = node.target in _ALIASES
        if node.target in COPIES and owner_of(base) not in overwritten \
                and not (joint.leaves(node) and _is_seen(joint, owner_of(base))):
            a, b = node.meta[VALUE], base.meta[VALUE]
            same = a.stride() == b.stride() and a.shape == b.shape
        if same:
            joint.replace(node, base)
            joint.graph.erase_node(node)


def _is_seen(joint: Joint, owner: fx.Node) -> bool:
    return owner in joint.sources or joint.leaves(owner)


# -- Chains of views -------------------------------------------------------------------------------
#
# A traced backward looks at values through chains of reshapes and transposes, each a call at every step. A
# view that is what an earlier one of its chain was becomes that one; of two reshapes in a row, the first
# goes.

_VIEWS = RESHAPES | TURNS | SQUEEZES | {aten.expand.default}

_NO_VIEW = (RuntimeError, ValueError)
"""Errors that views raise if only a copy has the wanted shape; those of fake tensors have an error of their
own."""


def shorten_views(joint: Joint) -> None:
    """Shorten chains of views, except for what the caller gets: an output stays the view that it is."""
    outputs = {n for n in joint.outputs if n is not None}
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or node.target not in _VIEWS or node in outputs:
            continue
        same = _earlier(node)
        if same is not None:
            joint.replace(node, same)
        elif node.target in RESHAPES and _base(node).target in RESHAPES:
            origin = _base(_base(node))
            viewed = _viewed(origin, node)
            if viewed is not None and viewed == _layout(node.meta[VALUE]):
                node.args = (origin, *node.args[1:])


def _base(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _earlier(node: fx.Node) -> fx.Node | None:
    """Return the first value of a view's chain that equals the view: the same elements in the same places."""
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
    """Return whether views (the last first) undo each other, whatever the strides of the value that they look
    at.

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
    """Return the layout of one value with another's shape, without a copy. (A fake tensor takes long to
    compute it.)"""
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
    """Return everything that distinguishes views of one storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype


# -- Written parts ---------------------------------------------------------------------------------
#
# Kernels that go over a wide result tile by tile keep one buffer for the tiles, and write and read a part of
# it. A trace has no writes in place: each write is a copy of the whole buffer with another part in it. A
# part that was just written is read as what was written.

_EXACT = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default,
          aten.where.self, aten.maximum.default, aten.copy.default, aten._to_copy.default,
          aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default,
          aten.mm.default, aten.addmm.default, aten.t.default}
"""Operations whose result does not depend on how their inputs lie in memory."""


def read_what_was_written(joint: Joint) -> None:
    """Replace parts that are read as they were written, parts that are the whole, and copies over a whole
    part by what was written."""
    overwritten, seen = joint.overwritten(), joint.results()
    for node in list(joint.graph.nodes):
        if node in seen or node.op != "call_function":
            continue
        value = _written(node)
        if value is not None and value.meta[VALUE].dtype == node.meta[VALUE].dtype \
                and value.meta[VALUE].shape == node.meta[VALUE].shape \
                and value.meta[VALUE].device == node.meta[VALUE].device \
                and owner_of(value) not in overwritten and value not in joint.sources \
                and (value.meta[VALUE].stride() == node.meta[VALUE].stride()
                     or all(user.target in _EXACT for user in node.users)):
            joint.replace(node, value)


def _written(node: fx.Node) -> fx.Node | None:
    """Return the node whose value a node has, if it is another node."""
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
    """Return dimension, begin, end and step of a part."""
    return tuple(given if given is not None else left_out
                 for given, left_out in zip((*args, *[None] * (4 - len(args))), (0, 0, None, 1), strict=True))


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


# -- Parts of parts --------------------------------------------------------------------------------


def write_to_parts_of_parts(joint: Joint) -> None:
    """Write to a part of a part in one step, and not again what was just written."""
    results = joint.results()
    position = {node: at for at, node in enumerate(joint.graph.nodes)}
    for node in list(joint.graph.nodes):
        writes = _writes(node)
        if not writes:
            continue
        whole = _base(node)
        value: torch.Tensor = whole.meta[VALUE]
        new = node
        if len(writes) > 1 and value.untyped_storage().nbytes() == value.nbytes:
            new = _one_write(joint, writes, position)
        if node not in results and (whole.target, whole.args[1:]) == (new.target, new.args[1:]):
            joint.replace(new, whole)


def _writes(node: fx.Node) -> list[fx.Node]:
    """Return writes to parts of copies, the first to a copy of a whole tensor, each of the others to a copy
    of the part that the previous one writes to."""
    found: list[fx.Node] = []
    while node.target in WRITES and not node.kwargs and node.meta[VALUE].numel() \
            and (not found or _is_part(_base(node), found)):
        found.append(node)
        node = node.args[1]  # type: ignore[assignment]
    return found


def _is_part(node: fx.Node, writes: list[fx.Node]) -> bool:
    """Return whether a node is the part that some writes write to."""
    for write in reversed(writes):
        step = step_to_part(write.target, write.args[2:])
        if node.kwargs or step_to_part(node.target, node.args[1:]) != step:
            return False
        node = _base(node)
    return node is _base(writes[0])


def _one_write(joint: Joint, writes: list[fx.Node], position: dict[fx.Node, int]) -> fx.Node:
    """Replace some writes by one to the whole tensor. Later readers of a part read it there."""
    last = writes[0]
    steps = [n for w in writes for n in step_to_part(w.target, w.args[2:]) or ()]
    part = _inserted(joint, last, WRITE_PART, (_base(last), writes[-1].args[1], steps))
    new = part
    for write, inner in zip(writes, writes[1:], strict=False):
        part = _inserted(joint, last, PARTS[write.target][0], (part, *write.args[2:]))
        for reader in list(inner.users):
            if position.get(reader, 0) > position[last]:
                reader.replace_input_with(inner, part)
    joint.replace(last, new)
    return new


def _inserted(joint: Joint, before: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with joint.graph.inserting_before(before):
        node = joint.graph.call_function(target, args)
    given = fx.node.map_arg(args, lambda n: n.meta[VALUE])
    with before.meta[VALUE].fake_mode:
        node.meta = dict(before.meta) | {VALUE: target(*given)}
    return node
