"""Rows that a program computes one by one and stacks: the same operations on all rows at once.

`torch.stack([row.logsumexp(-1) for row in logits])` takes a tensor of logits apart, and what follows works on
one part at a time. A head that runs a few rows at a time needs operations on all of them. Each row's numbers
are computed as before, by the same kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import ALIASES, is_pointwise, is_random, is_view
from rkmate.graph.passes.cleanup import drop_dead
from rkmate.graph.passes.joint import Joint, inserted, shape_of, value_of
from rkmate.torch_seam.nodes import is_backward
from rkmate.torch_seam.schema import schema_of

aten = torch.ops.aten

Lanes = tuple[fx.Node, ...]
"""One operation's nodes, a node for each row."""

_BY_DIMENSION = {
    aten.logsumexp.default, aten._log_softmax.default, aten._log_softmax_backward_data.default,
    aten._softmax.default, aten._softmax_backward_data.default, aten.sum.dim_IntList, aten.mean.dim,
    aten.amax.default, aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.slice_backward.default,
    aten.expand.default, aten.new_zeros.default, aten._to_copy.default, *ALIASES}
"""Operators that do the same with one more dimension in front, if their arguments count it."""
_DEEPEST = 100
"""Rows are followed through at most as many operations."""


def put_together(joint: Joint, wide: Collection[fx.Node]) -> None:
    """Compute rows that are taken from one of some values one by one, and then stacked, at once."""
    order = {node: k for k, node in enumerate(joint.graph.nodes)}
    writer = _Together(joint, wide, order)
    for node in list(order):
        lanes = _stacked(node)
        if lanes is not None and writer.reaches(lanes):
            new = writer.whole(lanes)
            if is_view(new) or value_of(new).stride() != value_of(node).stride():
                new = inserted(joint.graph, node, node, aten.clone.default, (new,),
                               memory_format=torch.contiguous_format)
            joint.replace(node, new)
    drop_dead(joint)


def is_stack(node: fx.Node) -> bool:
    """Return whether a value consists of rows that are computed one by one."""
    return _stacked(node) is not None


class _Together:
    """Writes operations on all rows for operations on one row each."""

    def __init__(self, joint: Joint, wide: Collection[fx.Node], order: dict[fx.Node, int]) -> None:
        self.joint = joint
        self.wide = wide
        self.order = order
        self.known: dict[Lanes, bool | None] = {}
        """Whether lanes read a part of one of the wide values; None if they are not parts of an operation on
        all rows."""
        self.written: dict[Lanes, fx.Node] = {}

    def reaches(self, lanes: Lanes) -> bool:
        """Return whether lanes can be one operation, and read a wide value."""
        return len(lanes) > 1 and self._reached(lanes, _DEEPEST) is True

    def _reached(self, lanes: Lanes, depth: int) -> bool | None:
        if lanes not in self.known:
            source = _source(lanes)
            self.known[lanes] = source in self.wide if source is not None \
                else self._reached_below(lanes, depth - 1) if depth else None
        return self.known[lanes]

    def _reached_below(self, lanes: Lanes, depth: int) -> bool | None:
        first = lanes[0]
        pointwise = is_pointwise(first.target)
        if not (pointwise or first.target in _BY_DIMENSION) or is_random(first) \
                or "memory_format" in first.kwargs or not all(_is_like(n, first) for n in lanes):
            return None
        operands = _operands(lanes)
        ranks = {len(shape_of(o[0])) for o in operands if len(set(o)) > 1}
        shared = [len(shape_of(o[0])) for o in operands if len(set(o)) == 1]
        if len(ranks) != 1 or (shared and not pointwise) or any(rank > min(ranks) for rank in shared):
            return None                     # the dimension in front would be another's
        dims: Any = first.args[1] if len(first.args) > 1 else 0
        if dims in (None, []) or (first.target is aten.expand.default and len(dims) not in ranks):
            return None                     # all dimensions, or a new one in front
        found = [self._reached(o, depth) for o in operands if len(set(o)) > 1]
        return None if None in found else any(found)

    def whole(self, lanes: Lanes) -> fx.Node:
        """Return the value of all rows."""
        source = _source(lanes)
        if source is not None:
            return source
        if len(set(lanes)) == 1:
            return lanes[0]
        if lanes not in self.written:
            last = max(lanes, key=self.order.__getitem__)
            args, kwargs = self._arguments(lanes)
            node = inserted(self.joint.graph, last.next, lanes[0], lanes[0].target, args, **kwargs)
            assert shape_of(node) == (len(lanes), *shape_of(lanes[0]))
            self.written[lanes] = node
        return self.written[lanes]

    def _arguments(self, lanes: Lanes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = lanes[0]
        target: Any = first.target
        by_dimension = target in _BY_DIMENSION
        operands = dict(zip(first.all_input_nodes, _operands(lanes), strict=True))

        def counted(name: str, value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.whole(operands[value])
            if by_dimension and name == "dim":
                return [d + (d >= 0) for d in value] if isinstance(value, (list, tuple)) \
                    else value + (value >= 0)
            if by_dimension and name in ("size", "input_sizes"):
                return [len(lanes), *value]
            return value

        names = [a.name for a in schema_of(target).arguments]
        return (tuple(counted(n, a) for n, a in zip(names, first.args, strict=False)),
                {k: counted(k, a) for k, a in first.kwargs.items()})


def _stacked(node: fx.Node) -> Lanes | None:
    """Return the rows that a value consists of; None if it is no stack, and no sum of gradients, each of
    another row."""
    if node.target is aten.stack.default and node.args[1:] in ((), (0,)):
        return tuple(node.args[0])  # type: ignore[arg-type]
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    rows: dict[Any, Any] = {}
    todo: list[Any] = [node]
    while todo:
        part = todo.pop()
        if not isinstance(part, fx.Node) or shape_of(part) != shape_of(node):
            return None
        if part.target is aten.add.Tensor and not part.kwargs:
            todo += part.args
        elif part.target is aten.select_backward.default and part.args[2] == 0 and part.args[3] not in rows:
            rows[part.args[3]] = part.args[0]
        else:
            return None
    count = shape_of(node)[0]
    return tuple(rows[k] for k in range(count)) if rows.keys() == set(range(count)) else None


def _operands(lanes: Lanes) -> list[Lanes]:
    """Return the lanes of each operand."""
    return list(zip(*(n.all_input_nodes for n in lanes), strict=True))


def _is_like(node: fx.Node, first: fx.Node) -> bool:
    """Return whether two nodes differ in their operands alone."""
    if node.target is not first.target or is_backward(node) != is_backward(first) \
            or shape_of(node) != shape_of(first) or len(node.all_input_nodes) != len(first.all_input_nodes):
        return False
    place = dict(zip(node.all_input_nodes, first.all_input_nodes, strict=True))
    return bool(fx.node.map_arg((node.args, node.kwargs), place.__getitem__) == (first.args, first.kwargs))


def _source(lanes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the value whose rows, in order, the lanes are; None if they are no such rows."""
    found: set[Any] = set()
    for k, node in enumerate(lanes):
        base: Any = node.args[0] if node.op == "call_function" and node.args else None
        if node.target is operator.getitem and node.args[1] == k and base.target is aten.unbind.int \
                and base.args[1:] in ((), (0,)):
            found.add(base.args[0])
        elif node.target is aten.select.int and node.args[1:] in ((0, k), (0, k - len(lanes))):
            found.add(base)
        else:
            return None
    source = found.pop()
    return source if not found and shape_of(source)[0] == len(lanes) else None
