"""Heads: wide products with everything up to their losses, which run a few rows at a time. The gradients are
exact, except that weight gradients are added up in another order, so that their last bits differ."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import PRODUCTS, is_view
from rkmate.graph.passes.cleanup import drop_dead
from rkmate.graph.passes.joint import Joint, inserted, makers_of, readers_of, result_of, shape_of, value_of
from rkmate.graph.passes.lean import is_wide
from rkmate.graph.passes.tiles.region import Region, grow, is_linear, seeds_of
from rkmate.graph.passes.tiles.rewrite import default_parts, in_groups, late_nodes, tile
from rkmate.graph.passes.tiles.rules import TURNED, WHOLE, RowTile, emit, emit_sum
from rkmate.graph.passes.tiles.together import is_stack, put_together
from rkmate.torch_seam.nodes import VALUE, is_backward

aten = torch.ops.aten


# -- Losses by rows --------------------------------------------------------------------------------
#
# torch's `nll_loss_forward` returns the reduced loss and the weight of all rows, which depends on the
# classes alone: known before any row's loss is.

_NONE, _MEAN = 0, 1
_IGNORE = -100


def by_rows(joint: Joint, loss: fx.Node) -> Callable[[], None]:
    """Write an `nll_loss_forward` as each row's loss and their reduction; returns what writes it as it was.

    If classes have no weights, torch's own kernel adds the rows up in its own order: it finds each one's
    value as the score of the only class.
    """
    scores, target, weight, reduction, ignore = loss.args
    value = scores.meta[VALUE]  # type: ignore[union-attr]
    graph = joint.graph

    def call(target_: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return inserted(graph, loss, loss, target_, args, **kwargs)

    counted = call(aten.ne.Scalar, target, ignore)
    if weight is None:
        total = call(aten._to_copy.default, call(aten.sum.default, counted), dtype=value.dtype)
    else:
        known = call(aten.masked_fill.Scalar, target, call(aten.bitwise_not.default, counted), 0)
        each = call(aten.index.Tensor, weight, [known])
        zero = call(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device)
        total = call(aten.sum.default, call(aten.where.self, counted, each, zero))
    rows = call(operator.getitem, call(aten.nll_loss_forward.default, scores, target, weight, _NONE,
                                       ignore), 0)
    if reduction == _NONE:
        reduced = rows
    elif weight is None:
        only = call(aten.unsqueeze.default, call(aten.neg.default, rows), 1)
        classes = call(aten.masked_fill.Scalar, call(aten.zeros_like.default, target),
                       call(aten.bitwise_not.default, counted), _IGNORE)
        reduced = call(operator.getitem, call(aten.nll_loss_forward.default, only, classes, None,
                                              reduction, _IGNORE), 0)
    else:
        reduced = call(aten.sum.default, rows)
        if reduction == _MEAN:
            reduced = call(aten.div.Tensor, reduced, total)
    before: Any = (loss.target, loss.args, loss.kwargs)
    about = dict(loss.meta)
    items: dict[Any, dict[str, Any]] = {}
    for user in list(loss.users):
        items[user.args[1]] = dict(user.meta)
        joint.replace(user, reduced if user.args[1] == 0 else total)
        graph.erase_node(user)
    graph.erase_node(loss)

    def undo() -> None:
        with graph.inserting_before(counted):
            again = graph.call_function(*before)
            again.meta = about
            for k, of_item in items.items():
                item = graph.call_function(operator.getitem, (again, k))
                item.meta = of_item
                joint.replace(reduced if k == 0 else total, item)

    return undo


# -- Rows that are left out ------------------------------------------------------------------------
#
# Language models' losses leave out the logits of each sequence's last word, after the product. What works
# row by row gives the same when the rows are left out before it; a gradient is zero for them.


@dataclass(frozen=True)
class Shift:
    """A region of which only some rows are read."""

    region: Region
    slices: tuple[fx.Node, ...]
    """Slices that read the region's values in the forward."""
    zeros: tuple[fx.Node, ...]
    """Gradients that enter the region's backward: of the read rows, with zeros for the others."""
    rows: tuple[int, ...]
    """The dimensions of all rows."""
    dim: int
    start: int
    end: int

    @property
    def left(self) -> tuple[int, ...]:
        """The dimensions of the rows that are read."""
        return (*self.rows[:self.dim], self.end - self.start, *self.rows[self.dim + 1:])


def shift_of(seed: fx.Node, late: Collection[fx.Node], leaving: Collection[fx.Node]) -> Shift | None:
    """Return the shift that leaves rows out of a wide product; None if all rows are read."""
    cuts = {n: c for n in seed.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
            if n not in late and (c := _cut(n, seed.meta[VALUE].shape)) is not None}
    cut = next((cuts[n] for n in readers_of([seed]) if n in cuts), None) if cuts else None
    if cut is None:
        return None
    # The product's own backward reads none of its values: it is found from where it comes in.
    region = grow(seed, [n for n in seed.graph.nodes if n in late and _cut(n, seed.meta[VALUE].shape) == cut])
    slices = [u for n in region.forms for u in n.users
              if u not in region.forms and u not in late and u.target is aten.slice.Tensor]
    zeros = [n for made in region.forms for n, form in region.needs(made).items()
             if n not in region.forms and form != WHOLE and region.wide(n) and n in late]
    if not slices or any(_cut(n, seed.meta[VALUE].shape) != cut for n in (*slices, *zeros)):
        return None
    rows, dim, start, end = cut
    of_zeros = {*zeros, *(n for n in readers_of(zeros) if n in region.forms)}
    results = [n for n in region.results(leaving) if not (n not in late and n not in leaving and all(
        u in slices or u in region.forms for u in n.users))]
    backward = [n for n in region.forms if n in late]
    if any(n not in of_zeros or region.forms[n] == TURNED or is_view(n) for n in results) \
            or any(n not in of_zeros or not is_linear(n, of_zeros) for n in backward):
        return None
    return Shift(region, tuple(slices), tuple(dict.fromkeys(zeros)), rows, dim, start, end)


def _cut(node: fx.Node, product: Sequence[int]) -> tuple[tuple[int, ...], int, int, int] | None:
    """Return the dimensions of a product's rows, and which part of which dimension a slice or its gradient
    leaves. `product`: the product's shape."""
    args: tuple[Any, ...] = tuple(node.args)
    if node.target is aten.slice.Tensor:
        shape = shape_of(args[0])
        rest: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1:]]
        dim, start, end, step = rest
    elif node.target is aten.slice_backward.default:
        shape = tuple(args[1])
        dim, start, end, step = args[2:6]
    else:
        return None
    if not shape or step != 1 or shape[-1] != product[1] or math.prod(shape[:-1]) != product[0] \
            or dim % len(shape) == len(shape) - 1:
        return None
    start, end, _ = slice(start, end).indices(shape[dim])
    return (shape[:-1], dim % len(shape), start, end) if end > start else None


def leave_out(joint: Joint, shift: Shift, late: Collection[fx.Node], leaving: Collection[fx.Node]) -> None:
    """Compute a region for the rows that are read."""
    region = shift.region
    order = {node: k for k, node in enumerate(joint.graph.nodes)}
    results = [r for r in region.results(leaving) if r in late]
    writer = _Writer(joint.graph, shift)
    for node in sorted(region.forms, key=order.__getitem__):
        writer.add(node)
    for cut in shift.slices:
        writer.like = cut
        source: Any = cut.args[0]
        with joint.graph.inserting_before(cut):
            made = writer.view(writer.values[source], shape_of(cut))
        joint.replace(cut, made)
    for result in results:
        writer.like = result
        with joint.graph.inserting_before(result):
            made = writer.values[result] if result in region.sums else writer.whole(result)
        joint.replace(result, made)


class _Writer:
    """Writes the operations of a region once more, for some of the rows."""

    def __init__(self, graph: fx.Graph, shift: Shift) -> None:
        self.graph = graph
        self.shift = shift
        self.values: dict[fx.Node, fx.Node] = {}
        self.operands: dict[tuple[fx.Node, int], fx.Node] = {}
        self.like = next(iter(shift.region.forms))
        """The operation in whose place something is written."""

    def add(self, node: fx.Node) -> None:
        """Write an operation of the region."""
        self.like = node
        region = self.shift.region
        forms = region.needs(node)
        with self.graph.inserting_before(node):
            operands = {o: self._operand(o, form) for o, form in forms.items()}
            before = node.prev
            tile = RowTile(self.graph, math.prod(self.shift.left), operands, forms)
            self.values[node] = emit_sum(node, tile) if node in region.sums \
                else emit(node, region.forms[node], tile)
        while before.next is not node:
            before = before.next
            self._settle(before)

    def view(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Return a value in another shape."""
        if not node.meta[VALUE].is_contiguous():
            node = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._call(aten.view.default, node, list(shape))

    def whole(self, node: fx.Node) -> fx.Node:
        """Return a result of all rows, with zeros for those that were left out."""
        shape = shape_of(node)
        tail = shape[self.shift.region.forms[node]:]
        whole = self._call(aten.slice_backward.default,
                           self.view(self.values[node], (*self.shift.left, *tail)), [*self.shift.rows, *tail],
                           self.shift.dim, self.shift.start, self.shift.end, 1)
        return self.view(whole, shape)

    def _operand(self, node: fx.Node, form: int) -> fx.Node:
        if node in self.values or form == WHOLE:
            return self.values.get(node, node)
        if (node, form) not in self.operands:
            tail = shape_of(node)[form:]
            some: Any = node.args[0] if node in self.shift.zeros else self._call(
                aten.slice.Tensor, self.view(node, (*self.shift.rows, *tail)), self.shift.dim,
                self.shift.start, self.shift.end)
            self.operands[node, form] = self.view(some, (math.prod(self.shift.left), *tail))
        return self.operands[node, form]

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self._settle(node)
        return node

    def _settle(self, node: fx.Node) -> None:
        """Give a new operation its value, and the rest of what it stands for."""
        if node.target is aten.reshape.default and value_of(node.all_input_nodes[0]).is_contiguous():
            node.target = aten.view.default
        node.meta = {**self.like.meta, VALUE: result_of(node, self.like)}


# -- Heads -----------------------------------------------------------------------------------------
#
# A wide product and the losses of its result. The logits of a language model, or of a classifier with many
# classes, are often its largest tensors.

_WIDER = 2
"""A head's product is more than this many times as wide as its input."""


def tile_heads(joint: Joint) -> None:
    """Note the weights of heads; let the heads run a few rows at a time where that is asked for.

    Logits that leave the graph, or that something else reads, are an argument of the head.
    """
    asked = joint
    stacks = any(map(is_stack, joint.graph.nodes))
    if stacks or any(True for _ in _shifts(joint)):
        joint = joint if "chunked-loss" in joint.choices else joint.copy()
    if stacks:
        put_together(joint, {n for seed in joint.graph.nodes if _is_seed(seed) for n in readers_of([seed])
                             if shape_of(n)[-1:] == shape_of(seed)[-1:]})
    while (shift := next(_shifts(joint), None)) is not None:
        leave_out(joint, shift, late_nodes(joint), joint.results())
        drop_dead(joint)
    late, leaving = late_nodes(joint), joint.results()
    found = seeds_of(joint.graph, _is_seed, lambda seed: _region(seed, late, leaving))
    names = [joint.name(weight_of(seed)) for seed in found]
    if "chunked-loss" in joint.choices:
        names = [name for name, seed in zip(names, found, strict=True)
                 if _tiled(joint, seed)]
    concerned = asked.concerned["chunked-loss"] = tuple(dict.fromkeys(names))
    # By groups of rows, gradients of weights are added up where they belong: they need a place that is there.
    asked.concerned["grouped-loss"] = concerned if "in-place" in asked.choices else ()


def heads_of(joint: Joint) -> set[fx.Node]:
    """Return the operations of the heads that `tile_heads` lets run a few rows at a time."""
    late, leaving = late_nodes(joint), joint.results()
    return {n for seed in seeds_of(joint.graph, _is_seed, lambda seed: _region(seed, late, leaving))
            for n in grow(seed).forms}


def _tiled(joint: Joint, seed: fx.Node) -> bool:
    """Let the head of a product run a few rows at a time. False, and nothing is changed, where it cannot."""
    undo = [by_rows(joint, node) for node in list(grow(seed).forms)
            if node.target is aten.nll_loss_forward.default]
    leaving, in_place = joint.results(), "in-place" in joint.choices
    region = _region(seed, late_nodes(joint), leaving)
    if region is not None:
        apart = _with_bases(_seen(region, leaving))
        if (in_place and "grouped-loss" in joint.choices and in_groups(joint, region, seed, apart)) or tile(
                joint, region, default_parts(region, seed.meta[VALUE]), apart=apart,
                in_forward=not in_place):
            return True
    for loss in reversed(undo):
        loss()
    drop_dead(joint)
    return False


def _shifts(joint: Joint) -> Iterator[Shift]:
    """Yield the shifts that leave out rows of wide products."""
    late, leaving = late_nodes(joint), joint.results()
    for node in joint.graph.nodes:
        if _is_seed(node) and (shift := shift_of(node, late, leaving)) is not None:
            yield shift


def _is_seed(node: fx.Node) -> bool:
    if node.target not in PRODUCTS or is_backward(node) or not is_wide(node.meta[VALUE], 0):
        return False
    x: Any = node.args[-2]
    return bool(node.meta[VALUE].shape[1] > _WIDER * x.meta[VALUE].shape[1])


def _region(seed: fx.Node, late: Collection[fx.Node], leaving: Collection[fx.Node]) -> Region | None:
    """Return the region of a head; None if the product is not a head's: nothing narrow depends on it, its
    result goes on through another product, or others read, or partly make, the gradient of its logits.
    `late`, `leaving`: what depends on a gradient, and what leaves the graph (`late_nodes`,
    `Joint.results`)."""
    region = grow(seed)
    seen = _seen(region, leaving)
    if any(n in late for n in seen) or any(
            n in late and n not in region.forms and form != WHOLE and region.wide(n)
            for made in region.forms for n, form in region.needs(made).items()):
        return None
    if seen:
        region = _without(region, _with_bases(seen))
    narrow = [n for n in region.results(leaving) if n not in late and (
        n in region.sums or not region.wide(n))]
    if not narrow or any(n.target in PRODUCTS for n in narrow):
        return None
    return region


def _seen(region: Region, leaving: Collection[fx.Node]) -> list[fx.Node]:
    """Return the region's wide values that others read, or that are among those that leave the graph."""
    return [n for n in region.results(leaving) if region.wide(n) and n not in region.sums]


def _with_bases(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Return some values and the values that they look at."""
    found = set(nodes)
    for node in nodes:
        while is_view(node):
            node = node.args[0]  # type: ignore[assignment]
            found.add(node)
    return found


def _without(region: Region, kept: Collection[fx.Node]) -> Region:
    """Return a region that reads some of its values from outside, without the operations that only those
    need."""
    gone, makers = set(kept), makers_of(kept)
    for node in reversed(list(next(iter(kept)).graph.nodes)):
        if node in makers and node in region.forms \
                and all(u in gone or u not in region.forms for u in node.users):
            gone.add(node)
    region.forms = {n: f for n, f in region.forms.items() if n not in gone}
    region.sums -= gone
    return region


def weight_of(product: fx.Node) -> fx.Node:
    """Return the value whose storage a product's second operand is, through conversions."""
    node: Any = product.args[-1]
    while node.op == "call_function" and (is_view(node) or node.target is aten._to_copy.default):
        node = node.args[0]
    found: fx.Node = node
    return found
