"""A rewriting pass: operations whose result nobody reads.

Assertions on metadata are among them: they hold for every call of the same signature.
"""

from __future__ import annotations

from rkmate.graph.passes.joint import Joint, adds, is_backward, is_random


def drop_dead(work: Joint) -> None:
    """Drop them; draws of the forward stay, as the generator's state moves on."""
    keep = work.handed()
    todo = [n for n in work.graph.nodes if not n.users and n.op == "call_function"]
    while todo:
        node = todo.pop()
        if node in keep or adds(node) or (is_random(node) and not is_backward(node)):
            continue
        read = node.all_input_nodes
        work.graph.erase_node(node)
        todo += [n for n in read if not n.users and n.op == "call_function"]
