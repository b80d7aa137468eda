"""Nodes added to a graph as copies of others.

Uses a private name of torch (a node's arguments, set without a look through all of them for symbolic
numbers, which a captured graph has none of); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx


def add_like(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A node at the end of a graph: another one's operation, under its name, with these arguments."""
    made = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    if args or kwargs:
        made._update_args_kwargs(args, kwargs)
    return made


def copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node at the end of a graph; it reads the copies of what the node reads."""
    if node.args or node.kwargs:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    else:
        args, kwargs = (), {}
    made = add_like(graph, node, args, kwargs)
    made.meta.update(node.meta)
    return made
