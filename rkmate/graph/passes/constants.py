"""A rewriting pass: values that depend on no trained value (masks, position ids), computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import Joint, is_backward, is_random
from rkmate.torch_seam.nodes import VALUE


def find_constants(work: Joint) -> None:
    """Note the values of the forward that depend on no trained value, no float input and no chance.

    Equal ones are computed once: every layer of a transformer asks for the same mask.
    """
    constant: set[fx.Node] = set()
    seen: dict[Any, fx.Node] = {}
    for node in list(work.graph.nodes):
        if node.op == "placeholder" or node.op == "get_attr":
            source = work.sources[node]
            value = node.meta.get(VALUE)
            fixed = source.kind in ("buffer", "constant") or (
                source.kind == "input" and isinstance(value, torch.Tensor)
                and not value.is_floating_point() and not value.is_complex())
            if fixed:
                constant.add(node)
        elif node.op == "call_function" and not is_backward(node) and not is_random(node) \
                and all(n in constant for n in node.all_input_nodes):
            if work.leaves(node):          # the caller may write to it
                constant.add(node)
                continue
            key = _key(node)
            if key in seen:
                work.replace(node, seen[key])
                work.graph.erase_node(node)
            else:
                seen[key] = node
                constant.add(node)
    work.constant = frozenset(constant)


def _key(node: fx.Node) -> Any:
    """What equal calls have in common."""
    def freeze(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return ("node", a)
        if isinstance(a, (list, tuple)):
            return tuple(freeze(x) for x in a)
        return (type(a).__name__, repr(a))
    return (node.target, freeze(node.args), tuple((k, freeze(v)) for k, v in sorted(node.kwargs.items())))
