"""A rewriting pass: the gradients that nobody asks for, as the loss leaves some outputs out."""

from __future__ import annotations

import torch
from torch import fx

from rkmate.graph.passes.joint import Rewriting

aten = torch.ops.aten


def drop_unwanted_gradients(work: Rewriting) -> None:
    """Let undefined gradients flow: what autograd does for outputs that the loss ignores."""
    dead = {n for n, s in work.sources.items()
            if s.kind == "tangent" and not work.wanted[int(s.key)]}
    if not dead:
        return
    gradient = {n for n, s in work.sources.items() if s.kind == "tangent"}
    for node in list(work.graph.nodes):
        if node.op != "call_function":
            continue
        from_loss = [n for n in node.all_input_nodes if n in gradient]
        if not from_loss:
            continue
        gradient.add(node)
        alive = [n for n in from_loss if n not in dead]
        if not alive:
            dead.add(node)
        elif len(alive) < len(from_loss):
            if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2 \
                    and alive[0].meta["val"].shape == node.meta["val"].shape:
                work.replace(node, alive[0])
            else:
                for n in from_loss:
                    if n in dead:
                        node.replace_input_with(n, _zeros(work.graph, n, node))
    work.grads = [(s, n) for s, n in work.grads if n not in dead]


def _zeros(graph: fx.Graph, like: fx.Node, before: fx.Node) -> fx.Node:
    value = like.meta["val"]
    with graph.inserting_before(before):
        node = graph.call_function(aten.full.default, (list(value.shape), 0), {
            "dtype": value.dtype, "device": value.device})
    with value.fake_mode:
        node.meta = {"val": torch.zeros(value.shape, dtype=value.dtype, device=value.device),
                     "partitioner_tag": "is_backward"}
    return node
