"""Gradients of whole keys and values over blocks of queries: a block adds its own to the sums, so that there
are no others of that size."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.attention import ATTENTION_BACKWARD_ADDED
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def sums_of(graph: fx.Graph) -> dict[int, int]:
    """Return the results of a tile that are gradients of keys and values and nothing else reads: the numbers
    of the keys' with those of the values'."""
    output: Any = graph.output_node().args[0]
    found: dict[int, int] = {}
    for node in graph.nodes:
        heads = [n.meta[VALUE].shape[1] for n in node.args[1:3]] if node.target is _BACKWARD else []
        if heads and heads[0] == heads[1]:
            ends = [_end(node, k) for k in (1, 2)]
            if all(e is not None and output.count(e) == 1 for e in ends):
                found[output.index(ends[0])] = output.index(ends[1])
    return found


def _end(node: fx.Node, k: int) -> fx.Node | None:
    """Return one of the gradients as it leaves, if it does, with zeros for the keys that no query sees."""
    items = [u for u in node.users if u.args[1] == k]
    while len(items) == 1 and len(items[0].users) == 1:
        (user,) = items[0].users
        if user.op == "output":
            return items[0]
        if user.target is not aten.slice_backward.default or user.args[2:4] != (2, 0):
            return None
        items = [user]
    return None


def added(graph: fx.Graph, sums: dict[int, int], like: dict[int, torch.Tensor]) -> fx.Graph:
    """Return a copy of a tile's operations that adds to sums, which come in after all arguments, keys before
    values. `like`: the sums, by the number of the result."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copies.update({n: made.node_copy(n) for n in graph.nodes if n.op == "placeholder"})
    into: dict[fx.Node, list[fx.Node]] = {}
    output: Any = graph.output_node().args[0]
    gone: set[fx.Node] = set()
    for pair in sums.items():
        for k in pair:
            sum_ = made.placeholder("sum")
            sum_.meta[VALUE] = like[k]
            end = output[k]
            gone.add(end)
            while end.target is not operator.getitem:
                end = end.args[0]
                gone.add(end)
            into.setdefault(end.args[0], []).append(sum_)
    for node in graph.nodes:
        if node.op == "call_function" and node not in gone:
            copies[node] = _copied(made, node, copies, into)
            copies[node].meta = dict(node.meta)
            if node in into:
                copies[node].meta[VALUE] = node.meta[VALUE][0]
    kept = [k for k in range(len(output)) if k not in sums and k not in sums.values()]
    made.output(tuple(copies[output[k]] for k in kept))
    return made


def _copied(made: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node],
            into: dict[fx.Node, list[fx.Node]]) -> fx.Node:
    base: Any = node.args[0]
    if node.target is operator.getitem and base in into:
        return copies[base]
    if node not in into:
        return made.node_copy(node, copies.__getitem__)
    seen = []
    for sum_, operand in zip(into[node], node.args[2:4], strict=True):
        value, length = sum_.meta[VALUE], operand.meta[VALUE].shape[2]          # type: ignore[union-attr]
        if value.shape[2] > length:
            part = made.create_node("call_function", aten.slice.Tensor, (sum_, 2, 0, length), {}, "part")
            part.meta[VALUE] = value.narrow(2, 0, length)
            sum_ = part
        seen.append(sum_)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    return made.create_node("call_function", ATTENTION_BACKWARD_ADDED, (*args[:8], *seen), kwargs,
                            "queries")
