"""A rewriting pass: the gradients that nobody asks for, as the loss leaves some outputs out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.graph.passes.joint import Joint
from rkmate.torch_seam.nodes import VALUE, phase_tag
from rkmate.torch_seam.patches.layouts import as_kernels_return_them

aten = torch.ops.aten


def drop_unwanted_gradients(work: Joint) -> None:
    """Let undefined gradients flow: what autograd does for outputs that the loss ignores."""
    dead = {n for n, s in work.sources.items()
            if s.kind == "tangent" and not work.wanted[int(s.key)]}
    if not dead:
        return
    gradient = {n for n, s in work.sources.items() if s.kind == "tangent"}
    moved: set[fx.Node] = set()
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
                    and alive[0].meta[VALUE].shape == node.meta[VALUE].shape:
                if _layout(alive[0].meta[VALUE]) != _layout(node.meta[VALUE]):
                    moved.update(node.users)
                work.replace(node, alive[0])
            else:
                for n in from_loss:
                    if n in dead:
                        node.replace_input_with(n, _zeros(work.graph, n, node))
    work.grads = tuple((s, n) for s, n in work.grads if n not in dead)
    _lay_out_again(work.graph, moved)


def _lay_out_again(graph: fx.Graph, moved: set[fx.Node]) -> None:
    """Values that depend on layouts other than the traced ones: a sum has its first summand's, and what is
    left of it has its own. `moved`: the first that read such a value."""
    if not moved:
        return
    with as_kernels_return_them():
        for node in list(graph.nodes):
            if node not in moved or node.op != "call_function":
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
            try:
                value = node.target(*args, **kwargs)
            except (RuntimeError, ValueError):
                if not is_view(node):
                    raise
                continue            # it has to copy now: the copy is laid out as traced
            if _layout(value) != _layout(node.meta[VALUE]):
                moved.update(node.users)
            node.meta[VALUE] = value


def _layout(value: Any) -> Any:
    """Strides, of each of several results."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout, value))
    return value.stride() if isinstance(value, torch.Tensor) else None


def _zeros(graph: fx.Graph, like: fx.Node, before: fx.Node) -> fx.Node:
    value = like.meta[VALUE]
    with graph.inserting_before(before):
        node = graph.call_function(aten.full.default, (list(value.shape), 0), {
            "dtype": value.dtype, "device": value.device})
    with value.fake_mode:
        node.meta = {VALUE: torch.zeros(value.shape, dtype=value.dtype, device=value.device),
                     **phase_tag(backward=True)}
    return node
