"""Rewrites of gradients: gradients that nobody asks for, gradients of parameters and of rows of embeddings,
and gradients that are added directly to ``.grad``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.captured import Source
from rkmate.graph.capture.repairs import retrace
from rkmate.graph.ops.embeddings import ADD_EMBEDDING_GRADIENT, ADD_ROWS, bytes_of_rows
from rkmate.graph.ops.products import ADD_CONVOLUTION_GRADIENT
from rkmate.graph.ops.properties import PRODUCTS, RESHAPES, SQUEEZES, TURNS, is_view
from rkmate.graph.passes.joint import Joint, inserted, owner_of
from rkmate.graph.passes.lean import is_wide
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import VALUE, is_backward, phase_tag, without_descriptor

aten = torch.ops.aten


# -- Gradients that come from the caller -----------------------------------------------------------
#
# A trace expects a gradient in the layout of its output. A caller may pass another one: an expanded number of
# a sum, a column of a stack. A copy would be added up in another order.


_MOVES = RESHAPES | SQUEEZES | TURNS
_OF_ANY_LAYOUT = {*PRODUCTS, aten.sum.dim_IntList}


def gradients_of_any_strides(joint: Joint) -> frozenset[int]:
    """Return the numbers of the outputs whose gradients only products of matrices and sums read: these give
    results of one layout, whatever the layout of an operand is."""
    handed = joint.handed()

    def takes_any(value: fx.Node) -> bool:
        return value not in handed and all(
            u.target in _OF_ANY_LAYOUT or (u.target in _MOVES and takes_any(u)) for u in value.users)

    return frozenset(int(s.key) for n, s in joint.sources.items() if s.kind == "tangent" and takes_any(n))


# -- Gradients that nobody asks for ----------------------------------------------------------------
#
# A loss may leave some outputs out.


def drop_unwanted_gradients(joint: Joint) -> None:
    """Let undefined gradients flow: what autograd does for outputs that the loss ignores."""
    dead = {n for n, s in joint.sources.items()
            if s.kind == "tangent" and not joint.wanted[int(s.key)]}
    if not dead:
        return
    gradient = {n for n, s in joint.sources.items() if s.kind == "tangent"}
    moved: set[fx.Node] = set()
    for node in list(joint.graph.nodes):
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
                joint.replace(node, alive[0])
            else:
                for n in from_loss:
                    if n in dead:
                        value = n.meta[VALUE]
                        zeros = inserted(joint.graph, node, n, aten.full.default, (list(value.shape), 0),
                                         meta=phase_tag(backward=True), dtype=value.dtype,
                                         device=value.device)
                        node.replace_input_with(n, zeros)
    joint.grads = tuple((s, n) for s, n in joint.grads if n not in dead)
    if moved:
        retrace(lambda: _lay_out_again(joint.graph, moved))


def _lay_out_again(graph: fx.Graph, moved: set[fx.Node]) -> None:
    """Recompute the values that depend on layouts other than the traced ones: a sum has the layout of its
    first summand, and a partial sum its own. `moved`: the first nodes that read such a value."""
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
    """Return the strides of a value, or of each of several results."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout, value))
    return value.stride() if isinstance(value, torch.Tensor) else None


# -- Gradients of parameters -----------------------------------------------------------------------


def take_sums_apart(joint: Joint) -> None:
    """Drop the sums that only add up one parameter's gradients.

    Autograd adds the parts itself, in the same order, and each leaves as soon as it is made.
    """
    grads: list[tuple[Source, fx.Node]] = []
    for source, node in joint.grads:
        parts: list[fx.Node] = []
        todo = [node]
        while todo:
            n = todo.pop()
            if source.kind == "param" and _is_private_sum(n, node):
                todo += reversed(n.args)  # type: ignore[arg-type]
            else:
                parts.append(n)
        grads += [(source, part) for part in parts]
    joint.grads = tuple(grads)


def _is_private_sum(node: fx.Node, total: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 \
            or (node is total and node.users) or len(node.users) > 1:
        return False
    shape = node.meta[VALUE].shape
    return all(isinstance(a, fx.Node) and a.op == "call_function" and is_backward(a)
               and set(a.users) == {node} and a.meta[VALUE].shape == shape for a in node.args)


def own_gradients(joint: Joint) -> None:
    """Copy gradients that share their storage with other values: a gradient that autograd receives belongs to
    the user."""
    count: dict[fx.Node, int] = {}
    for _, node in joint.grads:
        count[owner_of(node)] = count.get(owner_of(node), 0) + 1
    grads = list(joint.grads)
    for k, (source, node) in enumerate(grads):
        owner = owner_of(node)
        shared = count[owner] > 1 or owner.op != "call_function" or not is_backward(owner) \
            or _is_read_by_operations(owner)
        if source.kind == "param" and shared:
            before = node.next if node.op == "call_function" else \
                next(n for n in joint.graph.nodes if n.op == "call_function" and is_backward(n))
            grads[k] = source, inserted(joint.graph, before, node, aten.clone.default, (node,),
                                        meta=phase_tag(backward=True))
    joint.grads = tuple(grads)


def _is_read_by_operations(node: fx.Node) -> bool:
    """Return whether anything except views reads the node's storage."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if not is_view(user) and user.target is not operator.getitem:
            return True
        todo += user.users
    return False


# -- Rows of embeddings ----------------------------------------------------------------------------
#
# Torch makes the gradient of an embedding as large as its table, with zeros for all the words that did not
# occur, and autograd adds it to what else is there: where a table is tied to a language model's head, a
# second matrix of that size. The operator adds the rows of each word up among themselves, in torch's order,
# and each sum to its row of the other gradient, over which it may put its result: the same bits.


def add_rows_of_embeddings(joint: Joint) -> None:
    """Rewrite the sums of a gradient and an embedding's, where that is wide and made of few rows."""
    results = joint.results()
    for node in list(joint.graph.nodes):
        pair = _summands(node)
        if pair is None or pair[1] in results:
            continue
        total, dense = pair
        grad, indices, _, padding_idx, _ = dense.args
        new = inserted(joint.graph, node, node, ADD_ROWS, (total, grad, indices, padding_idx),
                       name="add_embedding_rows")
        joint.replace(node, new)
        joint.graph.erase_node(node)


def _summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return a gradient and the embedding's gradient that is added to it; None for any other node."""
    if node.target is not aten.add.Tensor or node.kwargs or not is_backward(node):
        return None
    values: list[fx.Node] = [a for a in node.args if isinstance(a, fx.Node)]
    if len(values) != 2 or any(_form(v) != _form(node) for v in values):
        return None
    a, b = values
    return (a, b) if _is_sparse(b, node) else (b, a) if _is_sparse(a, node) else None


def _is_sparse(node: fx.Node, reader: fx.Node) -> bool:
    """Return whether a node is the gradient of an embedding, for this reader alone, and has mostly zeros."""
    if node.target is not aten.embedding_dense_backward.default or set(node.users) != {reader} \
            or node.args[4]:
        return False
    dense = node.meta[VALUE]
    grad, indices = (n.meta[VALUE] for n in node.args[:2])  # type: ignore[union-attr]
    return is_wide(dense, 0) and indices.numel() > 0 and bytes_of_rows(grad, indices) < dense.nbytes


def _form(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    return node.meta[VALUE].shape, node.meta[VALUE].dtype


# -- Gradients in place ----------------------------------------------------------------------------
#
# Where the caller asks for it (``gradients="in_place"``), no gradient of a parameter leaves the step as a
# tensor. What makes one becomes an operation with a side effect: it adds to a place that the caller holds, a
# source of the kind ``grad``. Such an operation is of the backward, it runs once, and nobody reads what it
# returns.

_VIEWS = _MOVES | {aten.reshape.default}
"""Views that `_Adder.seen_as` undoes: `TURNS` by an operation of their kind, the others by a view."""
_PRODUCTS: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def add_gradients_in_place(joint: Joint) -> None:
    """Let each part of a parameter's gradient be added where it belongs, in the order in which it is made."""
    adder = _Adder(joint)
    for source, node in joint.grads:
        if source.kind == "param":
            adder.wanted.setdefault(node, []).append(adder.place(source))
    joint.grads = tuple((s, n) for s, n in joint.grads if s.kind != "param")
    for node in list(adder.wanted):
        adder.add(node)


class _Adder:
    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.graph = joint.graph
        self.wanted: dict[fx.Node, list[fx.Node]] = {}
        """Gradients, and the places that they are to be added to."""
        self._places: dict[Source, fx.Node] = {}
        self._of = {s: n for n, s in joint.sources.items()}

    def place(self, source: Source) -> fx.Node:
        """Return the placeholder for a parameter's ``.grad``; made when it is first needed."""
        if source not in self._places:
            like = self._of[source].meta[VALUE]
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                node = self.graph.placeholder(f"grad_{len(self._places)}")
            with like.fake_mode:
                node.meta[VALUE] = torch.empty_like(like)
            self.joint.sources[node] = Source("grad", source.key)
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
        """Insert an operation of the backward that adds to the places among its arguments. `like`: the node
        that it replaces; `before`: the node that it precedes."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        value = args[0].meta[VALUE]
        node.meta = without_descriptor(like.meta) | phase_tag(backward=True) | {"adds": True}
        with value.fake_mode:
            node.meta[VALUE] = torch.empty_like(value)        # not the place itself: it is no view

    def seen_as(self, place: fx.Node, views: Sequence[fx.Node], before: fx.Node) -> fx.Node | None:
        """Return a place in the form that a gradient has before some views (the last first); None if that
        needs a copy."""
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
    """Return the node before which a reader of a gradient is inserted: the next node, or the first node of
    the backward."""
    nodes = list(graph.nodes)
    first = next((n for n in nodes if n.op == "call_function" and is_backward(n)), nodes[-1].next)
    following: fx.Node = node.next if node.op == "call_function" and is_backward(node) else first
    return following


def _only_read_by(node: fx.Node, reader: fx.Node) -> bool:
    return set(node.users) == {reader}


def _before_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the value that a gradient is views of, and the views (the last first); None if something else
    reads it."""
    if node.users:
        return None
    views: list[fx.Node] = []
    while node.target in _VIEWS:
        views.append(node)
        base: fx.Node = node.args[0]  # type: ignore[assignment]
        if not _only_read_by(base, node):
            return None
        node = base
    return node, views


def _product(adder: _Adder, node: fx.Node, place: fx.Node) -> bool:
    """Let the kernel of a product of matrices, or of a sum of products, add its result."""
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
    """Let a tiled computation add its sums in place."""
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
    whole.target, whole.args = tiled.with_into((*tiled.into, k)), (*whole.args, seen)
    whole.meta["adds"] = True
    whole.meta[VALUE] = tuple(None if n == k else v for n, v in enumerate(whole.meta[VALUE]))
    return True


def _convolution(adder: _Adder, node: fx.Node, place: fx.Node) -> bool:
    """Make the gradients of a convolution's weight and bias a separate operation, before that of its input:
    afterwards, the input's values are not needed any more."""
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
    """Add an embedding's rows one by one."""
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
