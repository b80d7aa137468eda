"""Row rules of what sums over the rows: gradients of weights, of biases, and losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.tiles.forms import TURNED, WHOLE, lead_of, shape_of
from rkmate.graph.passes.tiles.rules import Forms, Tile, arguments, emit_same, together

aten = torch.ops.aten


def sums(node: fx.Node, rows: int) -> Forms | None:
    """The forms of the operands of an operation that sums over all rows; None where it is none."""
    target, args = node.target, arguments(node)
    if target is aten.mm.default:
        return together([(args[0], TURNED), (args[1], 1)])
    if target is aten.nll_loss_forward.default and args[3] != 0:      # taken apart before it is tiled
        return together([(args[0], 1), (args[1], 1), (args[2], WHOLE)])
    if target in (aten.sum.default, aten.mean.default):
        return together([(args[0], lead_of(shape_of(args[0]) or (), rows))])
    if target is aten.sum.dim_IntList:
        shape = shape_of(args[0]) or ()
        lead = lead_of(shape, rows)
        dims = {d % len(shape) for d in args[1] or range(len(shape))} if shape else set()
        if lead is not None and dims.issuperset(range(lead)):
            return together([(args[0], lead)])
    return None


def emit_sum(node: fx.Node, tile: Tile) -> fx.Node:
    """A tile's part of a sum, in the shape of the whole result."""
    if node.target is aten.mm.default:
        return emit_same(node, WHOLE, tile)
    base: Any = arguments(node)[0]
    shape, lead, value = shape_of(base) or (), tile.forms[base], tile.value[base]
    if node.target is aten.mean.default:
        part = tile.call(aten.sum.default, value, **node.kwargs)
        return tile.call(aten.div.Scalar, part, math.prod(shape))
    if node.target is aten.sum.default:
        return tile.call(aten.sum.default, value, **node.kwargs)
    dims = {d % len(shape) for d in arguments(node)[1] or range(len(shape))}
    left = [0, *(d - lead + 1 for d in sorted(dims) if d >= lead)]
    part = tile.call(aten.sum.dim_IntList, value, left, **node.kwargs)
    after = list(shape_of(node) or ())
    keep = len(arguments(node)) > 2 and bool(arguments(node)[2])
    return tile.call(aten.reshape.default, part, after) if keep else part
