"""A rewriting pass: gradients of parameters are added straight to what stands in ``.grad``.

Where the caller asks for it (``gradients="in_place"``), no gradient of a parameter leaves the step as a
tensor. What makes one becomes an operation with a side effect: it adds to a place that the caller holds, a
source of the kind ``grad``. Such an operation is of the backward, it runs once, and nobody reads what it
returns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.capture import Source
from rkmate.graph.ops.embeddings import ADD_EMBEDDING_GRADIENT
from rkmate.graph.ops.products import ADD_CONVOLUTION_GRADIENT
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import VALUE, phase_tag, without_descriptor

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
             aten.squeeze.dim, aten.squeeze.dims)
_PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def add_gradients_in_place(work: Joint) -> None:
    """Let each part of a parameter's gradient be added where it belongs, in the order in which it is made."""
    adder = _Adder(work)
    for source, node in work.grads:
        if source.kind == "param":
            adder.wanted.setdefault(node, []).append(adder.place(source))
    work.grads = tuple((s, n) for s, n in work.grads if s.kind != "param")
    for node in list(adder.wanted):
        adder.add(node)


class _Adder:
    def __init__(self, work: Joint) -> None:
        self.work = work
        self.graph = work.graph
        self.wanted: dict[fx.Node, list[fx.Node]] = {}
        """Gradients, and the places that they are to be added to."""
        self._places: dict[Source, fx.Node] = {}
        self._of = {s: n for n, s in work.sources.items()}

    def place(self, source: Source) -> fx.Node:
        """What stands for a parameter's ``.grad``; made when it is first asked for."""
        if source not in self._places:
            like = self._of[source].meta[VALUE]
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                node = self.graph.placeholder(f"grad_{len(self._places)}")
            with like.fake_mode:
                node.meta[VALUE] = torch.empty_like(like)
            self.work.sources[node] = Source("grad", source.key)
            self._places[source] = node
        return self._places[source]

    def add(self, node: fx.Node) -> None:
        """Add one gradient to its places, by the first rule that knows how; a plain sum else."""
        places = self.wanted[node]
        if len(places) == 1 and any(rule(self, node, places[0]) for rule in RULES):
            places.clear()
        for place in places:
            self.insert(_after(self.graph, node), node, aten.add_.Tensor, (place, node))

    def insert(self, before: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        """An operation of the backward that adds to the places among its arguments. `like`: what it takes
        the place of; `before`: what it stands in front of."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        value = args[0].meta[VALUE]
        node.meta = without_descriptor(like.meta) | phase_tag(backward=True) | {"adds": True}
        with value.fake_mode:
            node.meta[VALUE] = torch.empty_like(value)        # not the place itself: it is no view

    def seen_as(self, place: fx.Node, views: Sequence[fx.Node], before: fx.Node) -> fx.Node | None:
        """A place as what a gradient is before some views (the last first); None where that would be a
        copy."""
        value, steps = place.meta[VALUE], []
        for view in views:
            shape = view.args[0].meta[VALUE].shape  # type: ignore[union-attr]
            step: tuple[Any, tuple[Any, ...]]
            if view.target is aten.t.default:
                step = aten.t.default, ()
            elif view.target is aten.transpose.int:
                step = aten.transpose.int, view.args[1:]
            elif view.target is aten.permute.default:
                dims = [d % len(shape) for d in view.args[1]]  # type: ignore[union-attr, operator]
                step = aten.permute.default, ([dims.index(d) for d in range(len(dims))],)
            else:
                step = aten.view.default, (list(shape),)
            try:
                value = step[0](value, *step[1])
            except (RuntimeError, ValueError):
                return None
            steps.append((*step, value))
        for target, args, value in steps:
            with self.graph.inserting_before(before):
                place = self.graph.call_function(target, (place, *args))
            place.meta = {VALUE: value, **phase_tag(backward=True)}
        return place


def _after(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What to insert before what reads a gradient: what follows it, or the first node of the backward."""
    nodes = list(graph.nodes)
    first = next((n for n in nodes if n.op == "call_function" and is_backward(n)), nodes[-1].next)
    following: fx.Node = node.next if node.op == "call_function" and is_backward(node) else first
    return following


def _only_read_by(node: fx.Node, reader: fx.Node) -> bool:
    return set(node.users) == {reader}


def _before_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """What a gradient is views of, and the views (the last first); None where something else reads it."""
    if node.users:
        return None
    views: list[fx.Node] = []
    while node.target in (aten.t.default, aten.transpose.int, aten.permute.default, *_RESHAPES):
        views.append(node)
        base: fx.Node = node.args[0]  # type: ignore[assignment]
        if not _only_read_by(base, node):
            return None
        node = base
    return node, views


def _product(adder: _Adder, node: fx.Node, place: fx.Node) -> bool:
    """A product of matrices, or a sum of such, is added by the kernel that makes it."""
    found = _before_views(node)
    if found is None or not node.meta[VALUE].is_floating_point():
        return False
    at, views = found
    target, product = _PRODUCTS.get(at.target), at
    if at.target is aten.sum.dim_IntList and len(at.args) in (2, 3) and at.args[1] == [0] and not at.kwargs:
        product = at.args[0]  # type: ignore[assignment]
        if product.target is not aten.bmm.default or not _only_read_by(product, at):
            return False
        target = aten.addbmm_.default
    if target is None or product.kwargs or any(
            a.meta[VALUE].dtype != place.meta[VALUE].dtype for a in product.args):  # type: ignore[union-attr]
        return False
    seen = adder.seen_as(place, views, product)
    if seen is not None and target is aten.addbmm_.default and seen.meta[VALUE].dim() == 3:
        return False                      # a sum that keeps its dimension, which nobody took away
    if seen is None or (target is not aten.addbmm_.default
                        and seen.meta[VALUE].shape != product.meta[VALUE].shape):
        return False
    adder.insert(product, product, target, (seen, *product.args))
    return True


def _tiles(adder: _Adder, node: fx.Node, place: fx.Node) -> bool:
    """What is summed up over tiles is summed up there."""
    found = _before_views(node)
    if found is None or found[0].target is not operator.getitem:
        return False
    item, views = found
    whole: fx.Node = item.args[0]  # type: ignore[assignment]
    k: int = item.args[1]  # type: ignore[assignment]
    tiled, value = whole.target, item.meta[VALUE]
    if not isinstance(tiled, Tiled) or tiled.gives[k].lead or value.dtype != place.meta[VALUE].dtype \
            or not value.is_floating_point() or not is_backward(whole):
        return False
    seen = adder.seen_as(place, views, whole)
    if seen is None:
        return False
    whole.target, whole.args = tiled.with_into((*tiled.into, k), in_place=True), (*whole.args, seen)
    whole.meta["adds"] = True
    whole.meta[VALUE] = tuple(None if n == k else v for n, v in enumerate(whole.meta[VALUE]))
    return True


def _convolution(adder: _Adder, node: fx.Node, place: fx.Node) -> bool:
    """A convolution's gradients of weight and bias become an operation of their own, before that of its
    input: with it the input's values are no longer needed."""
    whole = node.args[0] if node.target is operator.getitem else None
    if not isinstance(whole, fx.Node) or whole.target is not aten.convolution_backward.default \
            or node.args[1] != 1 or node.users:
        return False
    g, x, weight, bias_sizes, *rest, mask = tuple[Any, ...](whole.args)
    into_bias = None
    for other in whole.users:
        if other.args[1] == 2 and not other.users and len(adder.wanted.get(other, ())) == 1:
            into_bias = adder.wanted[other].pop()
        elif other.args[1] != 0 and other is not node:
            return False
    adder.insert(whole, whole, ADD_CONVOLUTION_GRADIENT, (place, into_bias, g, x, weight, *rest))
    whole.args = (g, x, weight, bias_sizes, *rest, [mask[0], False, False])
    whole.meta[VALUE] = (whole.meta[VALUE][0], None, None)
    return True


def _embedding(adder: _Adder, node: fx.Node, place: fx.Node) -> bool:
    """An embedding's rows are added one by one."""
    if node.target is not aten.embedding_dense_backward.default or node.users or node.kwargs:
        return False
    g, indices, _, padding_idx, by_frequency = node.args
    if by_frequency:
        return False
    adder.insert(node, node, ADD_EMBEDDING_GRADIENT, (place, g, indices, padding_idx))
    return True


RULES: tuple[Callable[[_Adder, fx.Node, fx.Node], bool], ...] = (_product, _tiles, _convolution, _embedding)
"""Operations that can add to a given tensor by themselves: a rule is given a gradient that has one place, and
says whether it has rewritten what makes it."""
