"""Rows of a wide product that only a slice of it leaves out: they are not computed.

Language models' losses leave out the logits of each sequence's last word, after the product. What works row
by row gives the same when the rows are left out before it; a gradient is zero for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.tiles.forms import TURNED, WHOLE, shape_of
from rkmate.graph.passes.tiles.linear import is_linear
from rkmate.graph.passes.tiles.region import Region, grow, readers_of
from rkmate.graph.passes.tiles.rules import Tile, emit
from rkmate.graph.passes.tiles.sums import emit_sum
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


@dataclass(frozen=True)
class Shift:
    """A region of which only some rows are read."""

    region: Region
    slices: tuple[fx.Node, ...]
    """What reads its values in the forward."""
    zeros: tuple[fx.Node, ...]
    """What enters its backward: a gradient of those rows, with zeros for the others."""
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
    """What leaves rows out of a wide product; None where all are read."""
    cut = next((c for n in (seed, *readers_of([seed])) if n not in late and (
        c := _cut(n, seed.meta[VALUE].shape)) is not None and n.target is aten.slice.Tensor), None)
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
    """The dimensions of a product's rows, and which part of which one a slice or its gradient leaves.
    `product`: its shape."""
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


def leave_out(work: Joint, shift: Shift, late: Collection[fx.Node], leaving: Collection[fx.Node]) -> None:
    """Compute a region for the rows that are read."""
    region = shift.region
    order = {node: k for k, node in enumerate(work.graph.nodes)}
    results = [r for r in region.results(leaving) if r in late]
    writer = _Writer(work.graph, shift)
    for node in sorted(region.forms, key=order.__getitem__):
        writer.add(node)
    for cut in shift.slices:
        writer.like = cut
        source: Any = cut.args[0]
        with work.graph.inserting_before(cut):
            made = writer.view(writer.values[source], shape_of(cut) or ())
        work.replace(cut, made)
    for result in results:
        writer.like = result
        with work.graph.inserting_before(result):
            made = writer.values[result] if result in region.sums else writer.whole(result)
        work.replace(result, made)


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
            tile = Tile(self.graph, math.prod(self.shift.left), operands, forms, region.rows)
            self.values[node] = emit_sum(node, tile) if node in region.sums \
                else emit(node, region.forms[node], tile)
        while before.next is not node:
            before = before.next
            self._settle(before)

    def view(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A value in another shape."""
        if not node.meta[VALUE].is_contiguous():
            node = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._call(aten.view.default, node, list(shape))

    def whole(self, node: fx.Node) -> fx.Node:
        """A result of all rows, with zeros for those that were left out."""
        shape = shape_of(node) or ()
        tail = shape[self.shift.region.forms[node]:]
        whole = self._call(aten.slice_backward.default,
                           self.view(self.values[node], (*self.shift.left, *tail)), [*self.shift.rows, *tail],
                           self.shift.dim, self.shift.start, self.shift.end, 1)
        return self.view(whole, shape)

    def _operand(self, node: fx.Node, form: int) -> fx.Node:
        if node in self.values or form == WHOLE:
            return self.values.get(node, node)
        if (node, form) not in self.operands:
            tail = (shape_of(node) or ())[form:]
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
        values: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
        args, kwargs = values
        if node.target is aten.reshape.default and args[0].is_contiguous():
            node.target = aten.view.default
        target: Any = node.target
        with self.like.meta[VALUE].fake_mode:
            value = target(*args, **kwargs)
        node.meta = {k: v for k, v in self.like.meta.items() if k != VALUE} | {VALUE: value}
