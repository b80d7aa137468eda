"""Find the backward of a stretch in the joint graph.

Autograd derives the stretch once more, and each operation that comes out is looked up in the joint graph: the
same operator on the same operands. The gradients that enter the stretch are not known before. They are found
from operations that also read values of the forward. What is found equals the derivative, operation by
operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import COMMUTES, COPIES, is_random
from rkmate.graph.passes.joint import makers_of
from rkmate.torch_seam.nodes import VALUE, is_backward

aten = torch.ops.aten

Found = dict[fx.Node, fx.Node]
"""Nodes of a derived graph -> equal nodes of the joint graph."""


_OF_RESULTS = {aten.leaky_relu_backward.default: aten.leaky_relu.default,
               aten.hardtanh_backward.default: aten.hardtanh.default}
"""Backwards with the same bits from the result as from the operand: both have the same sign, or both are
within the same bounds."""


_LEFT_OUT = {*COPIES, aten.slice.Tensor}
"""Operations that the joint graph does not have where the result has their operand's layout."""


def canonical(target: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return an operation without what its result does not depend on: the running statistics of a batch norm
    in training mode and of its backward, the sizes of a bias whose gradient is not computed, and for an
    activation's backward whether it reads the result (of an activation in place) or the operand."""
    args = tuple(args)
    if target in _OF_RESULTS and isinstance(args[1], fx.Node):
        made = args[1]
        while made.target is aten.view.default:
            made = made.args[0]                                             # type: ignore[assignment]
        if made.target is _OF_RESULTS[target] and _form(made) == _form(args[1]):
            more = (args[2], False) if target is aten.leaky_relu_backward.default else args[2:]
            return target, (args[0], made.args[0], *more)
    if target is aten._native_batch_norm_legit_functional.default and args[5] is True:
        return aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:])
    if target is aten.native_batch_norm_backward.default and args[7] is True:
        return target, (*args[:3], None, None, *args[5:])
    if target is aten.convolution_backward.default and not args[10][2]:
        return target, (*args[:3], None, *args[4:])
    return target, args


class Matcher:
    """Looks up the operations of derived graphs in a joint graph."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._at: dict[Any, fx.Node] = {}
        self._same: dict[fx.Node, fx.Node] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            equal = node
            if node.op == "call_function" and not is_random(node):
                equal = self._at.setdefault(_key(node, self._same), node)
            self._same[node] = equal
            for operand in dict.fromkeys(_operands(node)):
                self._users.setdefault(self._same[operand], []).append(node)

    def same(self, node: fx.Node) -> fx.Node:
        """Return the first of the nodes that compute what a node does."""
        return self._same[node]

    def match(self, derived: fx.Graph, known: Mapping[fx.Node, fx.Node],
              wanted: Sequence[fx.Node]) -> Found | None:
        """Return the joint graph's nodes for those of a derived graph that `wanted` depends on; None if one
        is not found. `known`: of placeholders; those of other placeholders are found."""
        needed = {*wanted, *makers_of(wanted)}
        nodes = [n for n in derived.nodes if n.op == "call_function" and n in needed]
        found = {mine: self._same[there] for mine, there in known.items()}
        if not self._look_up(nodes, found):
            return None
        while True:
            open_ = [n for n in nodes if n not in found]
            if not open_:
                break
            some = self._anchored(nodes, open_, found)
            if some is None:
                break
            found = some
        return found if all(n in found for n in needed) else None

    def _look_up(self, nodes: Sequence[fx.Node], found: Found) -> bool:
        """Find all nodes whose operands are found. False: one is not there."""
        for node in nodes:
            if node in found or any(n not in found for n in node.all_input_nodes):
                continue
            first: Any = node.args[0] if node.args else None
            there = self._at.get(_key(node, found))
            if there is None and node.target in COMMUTES:
                there = self._at.get(_key(node, found, swapped=True))
            if there is None and node.target in _LEFT_OUT and _same_layout(node, first):
                there = found[first]
            if there is None:
                return False
            found[node] = there
        return True

    def _anchored(self, nodes: Sequence[fx.Node], open_: Sequence[fx.Node], found: Found) -> Found | None:
        """Find one more node that reads a value of the forward, and with it the gradients that it depends
        on."""
        for node in reversed(open_):
            anchor = next((n for n in node.all_input_nodes if n in found and not is_backward(found[n])), None)
            if anchor is None:
                continue
            for there in self._users.get(found[anchor], ()):
                trial = dict(found)
                if is_backward(there) and self._unify(node, there, trial) and self._look_up(nodes, trial):
                    return trial
        return None

    def _unify(self, node: fx.Node, there: fx.Node, found: Found) -> bool:
        """Let a derived node stand for a node of the joint graph, and its operands for that one's. False
        where they differ."""
        there = self._same[there]
        if node in found:
            return found[node] is there
        if _form(node) != _form(there):
            return False
        if node.op == "placeholder":
            found[node] = there
            return True
        first: Any = node.args[0] if node.args else None
        if node.target in _LEFT_OUT and there.target != node.target:
            return _same_layout(node, first) and self._unify(first, there, found)
        if node.target != there.target or _key(node, None) != _key(there, None):
            return False
        mine, theirs = _operands(node), _operands(there)
        orders = [theirs, theirs[::-1]] if node.target in COMMUTES and len(mine) == 2 else [theirs]
        for order in orders:
            trial = {**found, node: there}
            if all(self._unify(a, b, trial) for a, b in zip(mine, order, strict=True)):
                found.update(trial)
                return True
        return False


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands in the order in which they stand, each as often as it does."""
    found: list[fx.Node] = []
    fx.node.map_arg((canonical(node.target, node.args)[1], node.kwargs), found.append)
    return found


def _form(node: fx.Node) -> Any:
    value = node.meta.get(VALUE)
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _same_layout(copy: fx.Node, of: fx.Node) -> bool:
    """Return whether a copy has the layout of its original, so that the joint graph has none."""
    a, b = copy.meta[VALUE], of.meta[VALUE]
    return bool(a.shape == b.shape and a.stride() == b.stride())


def _key(node: fx.Node, found: Mapping[fx.Node, fx.Node] | None, *, swapped: bool = False) -> Any:
    """Return operator and arguments, with the nodes that stand for the operands; None: without operands."""
    target, args = canonical(node.target, node.args)
    args = args[::-1] if swapped else args
    kwargs = sorted((k, v) for k, v in node.kwargs.items() if v is not None)
    return target, _plain(args, found), _plain(tuple(kwargs), found)


def _plain(value: Any, found: Mapping[fx.Node, fx.Node] | None) -> Any:
    if isinstance(value, fx.Node):
        return "operand" if found is None else found.get(value, value)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v, found) for v in value)
    return type(value), value
