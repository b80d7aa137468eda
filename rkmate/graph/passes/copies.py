"""Joint passes: copies that copy nothing."""

from __future__ import annotations

import torch
from torch import fx

from rkmate.graph.passes.joint import Joint, owner_of
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_COPIES = {aten.clone.default, aten.lift_fresh_copy.default}


def drop_copies_of_outputs(work: Joint) -> None:
    """The copies that capture put on the outputs; they may change layout without harm.

    Not those of what the forward overwrites: the caller gets the value from before.
    """
    overwritten = work.overwritten()
    for node in dict.fromkeys(work.outputs):
        if node is None or node.target is not aten.clone.default or node.users:
            continue
        base: fx.Node = node.args[0]  # type: ignore[assignment]
        if owner_of(base) not in overwritten:
            work.replace(node, base)
            work.graph.erase_node(node)


def drop_copies(work: Joint) -> None:
    """Aliases, and copies whose layout is that of their input, are their input.

    Not where both can be seen by the caller, who may write to one of them.
    """
    overwritten = work.overwritten()
    for node in list(work.graph.nodes):
        if node.op != "call_function":
            continue
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node):
            continue
        same = node.target in _ALIASES
        if node.target in _COPIES and owner_of(base) not in overwritten \
                and not (work.leaves(node) and _is_seen(work, owner_of(base))):
            a, b = node.meta[VALUE], base.meta[VALUE]
            same = a.stride() == b.stride() and a.shape == b.shape
        if same:
            work.replace(node, base)
            work.graph.erase_node(node)


def _is_seen(work: Joint, owner: fx.Node) -> bool:
    return owner in work.sources or work.leaves(owner)
