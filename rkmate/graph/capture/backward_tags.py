"""Which nodes of a joint graph belong to the backward.

Uses private names of torch (the descriptors of a joint graph's inputs); tested with torch 2.13.
"""

from __future__ import annotations

from torch import fx
from torch._functorch._aot_autograd.descriptors import TangentAOTInput


def is_backward(node: fx.Node) -> bool:
    """Whether the tracer made the node while it ran the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def tag_what_needs_the_loss(graph: fx.Graph) -> None:
    """What depends on a gradient is of the backward, also where a nested graph has lost the tag."""
    for node in graph.nodes:
        if node.op == "call_function" and any(
                is_backward(n) or isinstance(n.meta.get("desc"), TangentAOTInput)
                for n in node.all_input_nodes):
            node.meta["partitioner_tag"] = "is_backward"
