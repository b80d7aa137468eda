"""A rewriting pass: operations whose result nobody reads.

Assertions on metadata are among them: they hold for every call of the same signature.
"""

from __future__ import annotations

from rkmate.graph.passes.joint import Rewriting, is_backward, is_random


def drop_dead(work: Rewriting) -> None:
    """Drop them; draws of the forward stay, as the generator's state moves on."""
    keep = work.results()
    for node in reversed(list(work.graph.nodes)):
        if node.op == "call_function" and not node.users and node not in keep \
                and not (is_random(node) and not is_backward(node)):
            work.graph.erase_node(node)
