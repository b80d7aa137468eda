"""The rewrite of collectives: each becomes one operation together with its wait."""

from __future__ import annotations

from rkmate.graph.capture.collectives import communicates, group_of
from rkmate.graph.ops.collectives import with_wait
from rkmate.graph.passes.joint import Joint
from rkmate.torch_seam.collectives import is_wait
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import operator_name


def wait_at_once(joint: Joint) -> None:
    """Replace each functional collective between several ranks, and its wait, by one operation where the
    collective starts."""
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or not communicates(node.target, node.args, node.kwargs):
            continue
        waits = [u for u in node.users if is_wait(u.target)]
        with joint.graph.inserting_after(node):
            new = joint.graph.call_function(with_wait(operator_name(node.target)),
                                            (*node.args[:-1], group_of(node)))
        new.meta = dict(node.meta)
        if waits:
            new.meta[VALUE] = waits[0].meta[VALUE]
        for old in (*waits, node):
            joint.replace(old, new)
            joint.graph.erase_node(old)
