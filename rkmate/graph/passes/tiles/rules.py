"""Row rules: how each operation treats the rows along which a region is cut, and how it is written for a few
rows.

`takes` returns the form that the operands of an operation must have so that its result has a given form.
`sums` does so for operations that sum over the rows: gradients of weights and biases, and losses. `emit` and
`emit_sum` write the operation for one tile, in which the dimensions of the rows are one dimension, the first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.ops.properties import is_pointwise
from rkmate.graph.passes.joint import arguments, shape_of, value_of
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import record_of
from rkmate.torch_seam.schema import operator_name

aten = torch.ops.aten


# -- Forms -----------------------------------------------------------------------------------------
#
# How a value holds the rows that a region is cut along.

WHOLE = 0
"""The form of a value that is the same for all rows."""
TURNED = -1
"""The form of a matrix whose last dimension are the rows. Any other form is how many leading dimensions are
the rows: 2 of ``[batch, time, width]``."""


def lead_of(shape: Sequence[int], rows: int) -> int | None:
    """Return the smallest number of leading dimensions that are the rows; None if none are."""
    count = 1
    for k, size in enumerate(shape, 1):
        count *= size
        if count == rows:
            return k
    return None


def aligned(shape: Sequence[int], result: Sequence[int], rows: int, form: int) -> int | None:
    """Return the form of an operand that is broadcast to a result of a form; None if it has a part of the
    rows' dimensions."""
    if form == TURNED:
        return TURNED if tuple(shape) == tuple(result) else WHOLE if math.prod(shape) == 1 else None
    full = (1,) * (len(result) - len(shape)) + tuple(shape)
    if full[:form] == tuple(result[:form]):
        return lead_of(shape, rows)
    return WHOLE if all(size == 1 for size in full[:form]) else None


def row_numel(node: fx.Node, rows: int) -> int:
    """Return the number of elements of a value per row."""
    return math.prod(shape_of(node) or (0,)) // rows


# -- Rules -----------------------------------------------------------------------------------------

Forms = dict[fx.Node, int]
"""Operands -> the form that each is wanted in."""
Form = Callable[[fx.Node, int, int], Forms | None]


@dataclass(frozen=True)
class RowTile:
    """A tile while it is written."""

    graph: fx.Graph
    n: fx.Node | int
    """Number of its rows."""
    value: Mapping[fx.Node, fx.Node]
    """The tile's value of each operand."""
    forms: Mapping[fx.Node, int]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation."""
        name = operator_name(target, "item").lstrip("_")
        return self.graph.create_node("call_function", target, args, kwargs, name)


Emit = Callable[[fx.Node, int, RowTile], fx.Node]


@dataclass(frozen=True)
class RowRule:
    """Rule for tiles of one kind of operations."""

    takes: Form
    emit: Emit


def takes(node: fx.Node, form: int, rows: int) -> Forms | None:
    """Return the forms of the operands of an operation whose result has a form; None if it is not an
    operation on each row by itself."""
    rule = _rule(node)
    if rule is None or not isinstance(value_of(node), torch.Tensor) \
            or (form > 0 and lead_of(shape_of(node), rows) != form):
        return None
    return rule.takes(node, form, rows)


def emit(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    """Write the operation on one tile."""
    rule = _rule(node)
    assert rule is not None
    return rule.emit(node, form, tile)


def _rule(node: fx.Node) -> RowRule | None:
    target: Any = node.target
    record = record_of(target)
    if record is not None and record.rows_like is not None:
        return RULES[record.rows_like]
    if target in RULES:
        return RULES[target]
    pointwise = is_pointwise(target) and torch.Tag.nondeterministic_seeded not in target.tags \
        and isinstance(node.meta.get(VALUE), torch.Tensor)
    return POINTWISE if pointwise else None


def together(pairs: list[tuple[Any, int | None]]) -> Forms | None:
    """Return the forms together; None if one is missing, or if an operand is needed in two forms."""
    found: Forms = {}
    for node, form in pairs:
        if node is None:
            continue
        if form is None or not isinstance(node, fx.Node) or found.setdefault(node, form) != form:
            return None
    return found


# -- Rules: pointwise ------------------------------------------------------------------------------


def _pointwise(node: fx.Node, form: int, rows: int) -> Forms | None:
    result = shape_of(node)
    return together([(n, aligned(shape_of(n), result, rows, form)) for n in node.all_input_nodes])


def fitted(operand: Any, form: int, rank: int, tile: RowTile) -> Any:
    """Return an operand whose value is broadcast, without the dimensions of size one at the places where the
    result has rows. `form`, `rank`: of the result."""
    if not isinstance(operand, fx.Node) or tile.forms.get(operand, WHOLE) != WHOLE:
        return tile.value[operand] if isinstance(operand, fx.Node) else operand
    shape = shape_of(operand)
    value = tile.value[operand]
    tail = rank - form
    if form == TURNED or len(shape) <= tail:
        return value
    return tile.call(aten.reshape.default, value, list(shape[len(shape) - tail:]))


def _emit_pointwise(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    rank = len(shape_of(node))
    args, kwargs = fx.node.map_arg((arguments(node), node.kwargs), lambda n: fitted(n, form, rank, tile))
    return tile.call(node.target, *args, **kwargs)


POINTWISE = RowRule(_pointwise, _emit_pointwise)


def _emit_clone(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    """Return the value itself if it has the copy's layout, without a copy."""
    base = arguments(node)[0]
    kept = node.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    return tile.value[base] if form > 0 and kept else _emit_pointwise(node, form, tile)


# -- Rules: along other dimensions -----------------------------------------------------------------


def _along(by_rows: tuple[int, ...], dim: int, *, default: Any = None) -> RowRule:
    """Work along dimensions (argument `dim`) that are no rows; arguments `by_rows` have rows."""

    def dims(node: fx.Node) -> list[int] | None:
        given = arguments(node)[dim] if len(arguments(node)) > dim else default
        found = given if isinstance(given, (list, tuple)) else [given]
        rank = len(shape_of(arguments(node)[0]))
        if node.target in _WIDER:
            rank += 1
        if not found or any(not isinstance(d, int) for d in found):
            return None
        return [d % max(rank, 1) for d in found]

    def takes(node: fx.Node, form: int, rows: int) -> Forms | None:
        along = dims(node)
        if form < 1 or along is None or min(along) < form:
            return None
        pairs: list[tuple[Any, int | None]] = []
        for k in by_rows:
            operand = arguments(node)[k] if len(arguments(node)) > k else None
            if isinstance(operand, fx.Node):
                shape = shape_of(operand)
                same = tuple(shape[:form]) == shape_of(node)[:form]
                pairs.append((operand, form if same and lead_of(shape, rows) == form else None))
        return together(pairs)

    def emit(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
        along = dims(node)
        assert along is not None
        args: list[Any] = list(fx.node.map_arg(arguments(node), tile.value.__getitem__))
        moved = [d - form + 1 for d in along]
        given = arguments(node)[dim] if len(arguments(node)) > dim else default
        args += [None] * (dim + 1 - len(args))
        args[dim] = moved if isinstance(given, (list, tuple)) else moved[0]
        if node.target in _SIZED:
            args[1] = [tile.n, *arguments(node)[1][form:]]
        kwargs = fx.node.map_arg(node.kwargs, tile.value.__getitem__)
        return tile.call(node.target, *args, **kwargs)

    return RowRule(takes, emit)


_SIZED = (aten.slice_backward.default, aten.select_backward.default)
_WIDER = (aten.unsqueeze.default, aten.select_backward.default)
"""Operators whose results have one dimension more than their first argument."""


# -- Rules: products -------------------------------------------------------------------------------


def _mm(node: fx.Node, form: int, rows: int) -> Forms | None:
    a, b = arguments(node)[:2]
    return together([(a, 1), (b, WHOLE)]) if form == 1 else None


def _addmm(node: fx.Node, form: int, rows: int) -> Forms | None:
    if form != 1:
        return None
    bias, a, b = arguments(node)[:3]
    return together([(bias, aligned(shape_of(bias), shape_of(node), rows, 1)),
                   (a, 1), (b, WHOLE)])


def _emit_addmm(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    bias, a, b = arguments(node)[:3]
    return tile.call(node.target, fitted(bias, 1, 2, tile), tile.value[a], tile.value[b],
                     **node.kwargs)


def _bmm(node: fx.Node, form: int, rows: int) -> Forms | None:
    return together([(n, 1) for n in arguments(node)]) if form == 1 else None


def emit_same(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    """Run the operation itself on a tile's values."""
    args, kwargs = fx.node.map_arg((arguments(node), node.kwargs), tile.value.__getitem__)
    return tile.call(node.target, *args, **kwargs)


# -- Rules: views and sizes ------------------------------------------------------------------------


def _view(node: fx.Node, form: int, rows: int) -> Forms | None:
    base = arguments(node)[0]
    return together([(base, lead_of(shape_of(base), rows))]) if form > 0 else None


def _emit_view(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    base: Any = arguments(node)[0]
    before, after = shape_of(base)[tile.forms[base]:], shape_of(node)[form:]
    value = tile.value[base]
    return value if before == after else tile.call(aten.reshape.default, value, [tile.n, *after])


def _expand(node: fx.Node, form: int, rows: int) -> Forms | None:
    base: Any = arguments(node)[0]
    if form < 1:
        return None
    return together([(base, aligned(shape_of(base), shape_of(node), rows, form))])


def _emit_expand(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    after = shape_of(node)
    return tile.call(aten.expand.default, fitted(arguments(node)[0], form, len(after), tile),
                     [tile.n, *after[form:]])


def _turn(node: fx.Node, form: int, rows: int) -> Forms | None:
    base: Any = arguments(node)[0]
    if len(shape_of(node)) != 2 or form not in (1, TURNED) or not _turns(node):
        return None
    return together([(base, TURNED if form == 1 else 1)])


def _turns(node: fx.Node) -> bool:
    """Return whether the two dimensions of a matrix change places."""
    rest = arguments(node)[1:]
    return node.target is aten.t.default or rest == ([1, 0],) or rest in ((0, 1), (1, 0), (-1, -2), (-2, -1))


def _emit_turn(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    return tile.call(aten.t.default, tile.value[arguments(node)[0]])


def _full(node: fx.Node, form: int, rows: int) -> Forms | None:
    return {} if form > 0 else None


def _emit_full(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    after = shape_of(node)[form:]
    return tile.call(node.target, [tile.n, *after], *arguments(node)[1:], **node.kwargs)


def _emit_new_zeros(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    value = node.meta[VALUE]
    return tile.call(aten.full.default, [tile.n, *value.shape[form:]], 0, dtype=value.dtype,
                     device=value.device)


def _pad(node: fx.Node, form: int, rows: int) -> Forms | None:
    pads: Any = arguments(node)[1]
    if form < 1 or len(pads) // 2 > len(shape_of(node)) - form:
        return None
    return together([(arguments(node)[0], form)])


def _cat(node: fx.Node, form: int, rows: int) -> Forms | None:
    dim: Any = arguments(node)[1] if len(arguments(node)) > 1 else 0
    if form < 1 or dim % len(shape_of(node)) < form:
        return None
    return together([(n, lead_of(shape_of(n), rows)) for n in arguments(node)[0]])


def _emit_cat(node: fx.Node, form: int, tile: RowTile) -> fx.Node:
    dim: Any = arguments(node)[1]
    rank = len(shape_of(node))
    return tile.call(node.target, [tile.value[n] for n in arguments(node)[0]], dim % rank - form + 1)


# -- Rules: pieces of losses, and what several results are made of ---------------------------------


def _item(node: fx.Node, form: int, rows: int) -> Forms | None:
    return together([(arguments(node)[0], form)])


def _nll(node: fx.Node, form: int, rows: int) -> Forms | None:
    """Return the forms for the separate loss of each row; a reduced loss is taken apart before."""
    scores, target, weight, reduction = arguments(node)[:4]
    return together([(scores, 1), (target, 1), (weight, WHOLE)]) if form == 1 and reduction == 0 else None


def _nll_backward(node: fx.Node, form: int, rows: int) -> Forms | None:
    grad, scores, target, weight, reduction, _, total, *dim = arguments(node)
    if form != 1 or any(d not in (1, -1) for d in dim):         # a log-softmax is differentiated, too
        return None
    return together([(grad, WHOLE if reduction else 1), (scores, 1), (target, 1), (weight, WHOLE),
                   (total, WHOLE)])


def _look_up(node: fx.Node, form: int, rows: int) -> Forms | None:
    """Return the forms for looking up rows in a whole table."""
    table, index = arguments(node)[:2]
    if isinstance(index, (list, tuple)):
        if len(index) != 1:
            return None
        index = index[0]
    return together([(table, WHOLE), (index, form)]) if form > 0 else None


# -- Rules: the table ------------------------------------------------------------------------------

_VIEW = RowRule(_view, _emit_view)
_TURN = RowRule(_turn, _emit_turn)
_NLL_BACKWARD = RowRule(_nll_backward, emit_same)
_LOOK_UP = RowRule(_look_up, emit_same)
_FULL = RowRule(_full, _emit_full)

RULES: dict[Any, RowRule] = {
    aten.mm.default: RowRule(_mm, emit_same),
    aten.addmm.default: RowRule(_addmm, _emit_addmm),
    aten.bmm.default: RowRule(_bmm, emit_same),
    aten.clone.default: RowRule(_pointwise, _emit_clone), aten._to_copy.default: POINTWISE,
    aten.view.default: _VIEW, aten._unsafe_view.default: _VIEW, aten.reshape.default: _VIEW,
    aten.expand.default: RowRule(_expand, _emit_expand),
    aten.t.default: _TURN, aten.transpose.int: _TURN, aten.permute.default: _TURN,
    aten.full.default: _FULL, aten.zeros.default: _FULL, aten.ones.default: _FULL,
    aten.new_zeros.default: RowRule(_full, _emit_new_zeros),
    aten.zeros_like.default: POINTWISE, aten.ones_like.default: POINTWISE, aten.full_like.default: POINTWISE,
    aten.constant_pad_nd.default: RowRule(_pad, emit_same),
    aten.cat.default: RowRule(_cat, _emit_cat),
    aten.nll_loss_forward.default: RowRule(_nll, emit_same),
    aten.nll_loss_backward.default: _NLL_BACKWARD,
    aten.index.Tensor: _LOOK_UP, aten.embedding.default: _LOOK_UP,
    operator.getitem: RowRule(_item, emit_same),
    aten.gather.default: _along((0, 2), 1), aten.scatter.value: _along((0, 2), 1),
    aten.scatter.src: _along((0, 2, 3), 1), aten.scatter_add.default: _along((0, 2, 3), 1),
    aten.topk.default: _along((0,), 2, default=-1),
    aten.slice.Tensor: _along((0,), 1, default=0), aten.select.int: _along((0,), 1),
    aten.unsqueeze.default: _along((0,), 1), aten.squeeze.dim: _along((0,), 1),
    aten.squeeze.dims: _along((0,), 1),
    aten.slice_backward.default: _along((0,), 2), aten.select_backward.default: _along((0,), 2),
    aten._log_softmax.default: _along((0,), 1), aten._softmax.default: _along((0,), 1),
    aten._log_softmax_backward_data.default: _along((0, 1), 2),
    aten._softmax_backward_data.default: _along((0, 1), 2),
}
for _reduction in (aten.logsumexp.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default,
                   aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default,
                   aten.any.dim, aten.all.dim, aten.cumsum.default, aten.var_mean.correction):
    RULES[_reduction] = _along((0,), 1)


# -- Sums over the rows ----------------------------------------------------------------------------


def sums(node: fx.Node, rows: int) -> Forms | None:
    """Return the forms of the operands of an operation that sums over all rows; None for other operations."""
    target, args = node.target, arguments(node)
    if target is aten.mm.default:
        return together([(args[0], TURNED), (args[1], 1)])
    if target is aten.nll_loss_forward.default and args[3] != 0:      # taken apart before it is tiled
        return together([(args[0], 1), (args[1], 1), (args[2], WHOLE)])
    if target in (aten.sum.default, aten.mean.default):
        return together([(args[0], lead_of(shape_of(args[0]), rows))])
    if target is aten.sum.dim_IntList:
        shape = shape_of(args[0])
        lead = lead_of(shape, rows)
        dims = {d % len(shape) for d in args[1] or range(len(shape))} if shape else set()
        if lead is not None and dims.issuperset(range(lead)):
            return together([(args[0], lead)])
    return None


def emit_sum(node: fx.Node, tile: RowTile, *, is_part: bool = False) -> fx.Node:
    """Write a tile's part of a sum, in the shape of the whole result. `is_part`: other parts are added to it
    in float32. A part in half precision then stays in float32, and the sum is rounded once, as by torch's
    kernel for the whole sum. Products do so on the CPU alone: elsewhere, those in half precision are far
    faster."""
    half = is_part and node.meta[VALUE].is_floating_point() and node.meta[VALUE].dtype.itemsize < 4
    if node.target is aten.mm.default:
        if not half or not devices.of(node.meta[VALUE]).cpu_kernels:
            return emit_same(node, WHOLE, tile)
        a, b = (tile.call(aten._to_copy.default, tile.value[n], dtype=torch.float32)
                for n in arguments(node)[:2])
        return tile.call(aten.mm.default, a, b)
    base: Any = arguments(node)[0]
    shape, lead, value = shape_of(base), tile.forms[base], tile.value[base]
    kwargs: dict[str, Any] = ({"dtype": torch.float32} if half else {}) | dict(node.kwargs)
    if node.target is aten.mean.default:
        part = tile.call(aten.sum.default, value, **kwargs)
        return tile.call(aten.div.Scalar, part, math.prod(shape))
    if node.target is aten.sum.default:
        return tile.call(aten.sum.default, value, **kwargs)
    dims = {d % len(shape) for d in arguments(node)[1] or range(len(shape))}
    left = [0, *(d - lead + 1 for d in sorted(dims) if d >= lead)]
    part = tile.call(aten.sum.dim_IntList, value, left, **kwargs)
    after = list(shape_of(node))
    keep = len(arguments(node)) > 2 and bool(arguments(node)[2])
    return tile.call(aten.reshape.default, part, after) if keep else part
