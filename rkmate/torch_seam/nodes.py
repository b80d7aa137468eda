"""Metadata of graph nodes: the only file that knows the keys under which torch's tracer leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

VALUE = "val"
"""Key of a node's value: a fake tensor, a number, or a container of those."""
TENSOR_META = "tensor_meta"
"""Key of a summary of the value."""
_TAG = "partitioner_tag"
_FORWARD, _BACKWARD = "is_forward", "is_backward"
_DESCRIPTOR = "desc"
_SEQUENCE = "seq_nr"
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_CUSTOM = "custom"
WISH = "rkmate_wish"
"""Key of a wish among a node's annotations."""
_ROOT = "L__self__"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a node's value, or of several in a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (tuple, list)) else []


def is_backward(node: fx.Node) -> bool:
    """Return whether the tracer made the node while it ran the backward."""
    return bool(node.meta.get(_TAG) == _BACKWARD)


def phase_tag(*, backward: bool) -> dict[str, str]:
    """Return the metadata that assigns a node to the forward or to the backward."""
    return {_TAG: _BACKWARD if backward else _FORWARD}


def without_descriptor(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a node's metadata that does not say which input or output the node is."""
    return {k: v for k, v in meta.items() if k != _DESCRIPTOR}


def descriptor(node: fx.Node) -> Any:
    """Return what an input node stands for (`trace.role_of` reads it), or of an output node the list of what
    each result stands for; None if the tracer left nothing."""
    return node.meta.get(_DESCRIPTOR)


def sequence_number(node: fx.Node) -> int | None:
    """Return autograd's sequence number, which a backward operation shares with the forward operation that it
    was derived from; None if the tracer left none."""
    return node.meta.get(_SEQUENCE)


def module_stack(node: fx.Node) -> Mapping[str, tuple[str, Any]] | None:
    """Return the modules whose forwards were running, outermost first, as (path, class); of a backward
    operation, those of its forward operation. None if the tracer left none."""
    return next((found for key in _STACKS if (found := node.meta.get(key))), None)


def annotation(meta: Mapping[str, Any], key: str) -> Any:
    """Return what `torch.fx.traceback.annotate` left under a key; None if it left nothing."""
    return meta.get(_CUSTOM, {}).get(key)


@contextmanager
def wish_marked(wish: tuple[Any, ...]) -> Iterator[None]:
    """Let operations that are traced inside the context carry a wish of the user's."""
    with torch.fx.traceback.preserve_node_meta(), torch.fx.traceback.annotate({WISH: wish}):
        yield


def wish_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the wish that a node carries."""
    wish: tuple[Any, ...] | None = annotation(node.meta, WISH)
    return wish


def carry_wish(node: fx.Node, wish: tuple[Any, ...]) -> None:
    """Let a node carry a wish."""
    node.meta[_CUSTOM] = {**node.meta.get(_CUSTOM, {}), WISH: wish}


def add_like(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Append another node's operation to a graph, under its name, with new arguments.

    The arguments hold no symbolic numbers, so they are set without a search for these.
    """
    made = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    if args or kwargs:
        made._update_args_kwargs(args, kwargs)
    return made


def copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Append a copy of a node to a graph, which reads the copies of what the node reads."""
    if node.args or node.kwargs:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    else:
        args, kwargs = (), {}
    made = add_like(graph, node, args, kwargs)
    made.meta.update(node.meta)
    return made


def moved(meta: Mapping[str, Any], sequence: Callable[[int], int | None],
          stack: Callable[[Mapping[str, tuple[str, Any]]], Mapping[str, tuple[str, Any]]],
          annotation: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a node's metadata for a copy in another layer, without the role of an input.

    sequence: autograd's number -> the copy's, or None. stack: modules whose forwards were running -> the
    copy's. annotation: key and value of an annotation -> the copy's value, or None.
    """
    made = without_descriptor(meta)
    if made.get(_SEQUENCE) is not None:
        made[_SEQUENCE] = sequence(made[_SEQUENCE])
    for key in _STACKS:
        if made.get(key):
            made[key] = stack(made[key])
    if made.get(_CUSTOM):
        made[_CUSTOM] = {k: new for k, v in made[_CUSTOM].items() if (new := annotation(k, v)) is not None}
    return made


def renamed(stack: Mapping[str, tuple[str, Any]],
            rename: Callable[[str], str]) -> dict[str, tuple[str, Any]]:
    """Return modules whose forwards were running (`module_stack`) under other paths."""
    made = {}
    for key, (path, kind) in stack.items():
        new, old = rename(path), f"{_ROOT}{path}"
        # Of a module that is called again, a suffix of the key says which call it is.
        made[f"{_ROOT}{new}{key[len(old):]}" if key.startswith(old) else key] = (new, kind)
    return made
