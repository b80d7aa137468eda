"""How each operation treats a dimension along which its result is cut: which part of its operands a part of
the result needs, and how the operation is written for that part.

A batch is cut into images, an image into bands, a volume into slabs, a sequence into blocks. What an
operation computes from its neighbours (a convolution's window) is part of what it needs: neighbouring parts
overlap there. Only forward operations have rules. The backward of a part is derived from its forward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import is_pointwise, is_random
from rkmate.graph.passes.joint import arguments, shape_of, value_of
from rkmate.graph.passes.tiles import windows
from rkmate.graph.passes.tiles.norms import normalized
from rkmate.graph.passes.tiles.pieces import Band, CutRule, Need, Piece, Write, same
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


# -- Pieces of operations --------------------------------------------------------------------------


def piece(node: fx.Node, band: Band) -> Piece | None:
    """Return an operation for a part of its result (of several results, for that part of the first one); None
    if it cannot be cut along this dimension."""
    target: Any = node.target
    rule = RULES.get(target)
    if rule is None and is_pointwise(target):
        rule = _pointwise
    if rule is None or is_random(node) or not isinstance(value_of(node), torch.Tensor):
        return None
    return rule(node, band)


def summand(node: fx.Node, band: Band) -> Piece | None:
    """Return what a part of its first operand contributes to a sum over this dimension; None for other
    operations."""
    rule = SUMS.get(node.target)
    return None if rule is None else rule(node, band)


# -- Rules: pointwise ------------------------------------------------------------------------------


def _pointwise(node: fx.Node, band: Band) -> Piece | None:
    return same(node, _broadcast(node.all_input_nodes, shape_of(node), band))


def _broadcast(operands: Sequence[fx.Node], shape: Sequence[int], band: Band) -> list[Need]:
    """Return the parts of operands that are broadcast to a shape."""
    found: list[Need] = []
    for operand in operands:
        dim = band.dim - len(shape) + len(shape_of(operand))
        if dim >= 0 and shape_of(operand)[dim] == shape[band.dim]:
            found.append((operand, Band(dim, band.start, band.stop)))
    return found


# -- Rules: norms and attention --------------------------------------------------------------------


def _layer_norm(node: fx.Node, band: Band) -> Piece | None:
    x, normalized = arguments(node)[:2]
    return same(node, [(x, band)]) if band.dim < len(shape_of(x)) - len(normalized) else None


def _group_norm(node: fx.Node, band: Band) -> Piece | None:
    x, weight, bias, _, *rest = arguments(node)
    return same(node, [(x, band)], args=(x, weight, bias, len(band), *rest)) \
        if band.dim == 0 else normalized(node, band)


def _batch_norm(node: fx.Node, band: Band) -> Piece | None:
    """Cut a batch norm with known statistics between pixels and images, one without running statistics by
    channels, any other with statistics that tiles compute before."""
    x, *_ = arguments(node)
    channels = [n for n in node.all_input_nodes if n is not x]
    known = node.target is aten._native_batch_norm_legit_no_training.default or (
        node.target is aten.native_batch_norm.default and node.args[5] is False)
    if known and band.dim != 1:
        return same(node, [(x, band)])
    if not known and band.dim == 1 and (
            node.target is aten._native_batch_norm_legit.no_stats or node.args[3:5] == (None, None)):
        return same(node, [(x, band), *[(n, Band(0, band.start, band.stop)) for n in channels]])
    return None if known else normalized(node, band)


def _attention(node: fx.Node, band: Band) -> Piece | None:
    """Cut attention by sequences, by heads, or by blocks of queries, with keys and values whole."""
    q, k, v, dropout, causal = arguments(node, (None, None, None, 0.0, False))
    mask: Any = node.kwargs.get("attn_mask")
    rank = len(shape_of(q))
    if dropout or band.dim > rank - 2 or (mask is not None and causal):
        return None
    masks = [] if mask is None else _broadcast([mask], (*shape_of(q)[:-1], shape_of(k)[-2]), band)
    if band.dim < rank - 2:
        if shape_of(k)[band.dim] != shape_of(q)[band.dim]:
            return None
        return same(node, [*((n, band) for n in dict.fromkeys((q, k, v))), *masks])
    if q in (k, v):
        return None
    if not causal:
        return same(node, [(q, band), *masks])
    # Queries see the keys up to their own place.
    seen = min(band.stop, shape_of(k)[-2])

    def write(tile: Write) -> fx.Node:
        keys, values = (tile.get((n, None)) if seen == shape_of(n)[-2] else tile.call(
            aten.slice.Tensor, tile.get((n, None)), rank - 2, 0, seen) for n in (k, v))
        value = value_of(q)
        hidden = tile.call(aten.full.default, [len(band), seen], -math.inf, dtype=value.dtype,
                           device=value.device)
        hidden = tile.call(aten.triu.default, hidden, band.start + 1)
        return tile.call(node.target, tile.get((q, band)), keys, values, 0.0, False,
                         **{**node.kwargs, "attn_mask": hidden})

    return Piece(((q, band), (k, None), (v, None)), write)


# -- Rules: products -------------------------------------------------------------------------------


def _product(node: fx.Node, band: Band) -> Piece | None:
    *bias, a, b = arguments(node)
    rank = len(shape_of(node))
    needs = _broadcast(bias, shape_of(node), band)
    if a is b or a in bias or b in bias:
        return None
    if band.dim != rank - 1:
        needs.append((a, band))
    if band.dim != rank - 2:
        needs.append((b, band))
    return same(node, needs)


def _embedding(node: fx.Node, band: Band) -> Piece | None:
    index: Any = node.args[1]
    return same(node, [(index, band)]) if band.dim < len(shape_of(index)) else None


# -- Rules: views, and operations along other dimensions -------------------------------------------


def _view(node: fx.Node, band: Band) -> Piece | None:
    base: Any = node.args[0]
    shape, before = shape_of(node), shape_of(base)
    outer, inner = math.prod(shape[:band.dim]), math.prod(shape[band.dim + 1:])
    for dim, size in enumerate(before):
        if math.prod(before[:dim]) == outer and (size > 1 or shape[band.dim] == 1):
            each = math.prod(before[dim + 1:])
            (start, left), (stop, over) = divmod(band.start * inner, each), divmod(band.stop * inner, each)
            if left or over:
                return None
            now = [*shape[:band.dim], len(band), *shape[band.dim + 1:]]
            return _reshaped((base, Band(dim, start, stop)), now)
    return None


def _reshaped(need: Need, shape: list[int]) -> Piece:
    return Piece((need,), lambda tile: tile.call(aten.reshape.default, tile.get(need), shape))


def _expand(node: fx.Node, band: Band) -> Piece | None:
    base: Any = node.args[0]
    shape = list(shape_of(node))
    shape[band.dim] = len(band)
    return same(node, _broadcast([base], shape_of(node), band), args=(base, shape))


def _permute(node: fx.Node, band: Band) -> Piece | None:
    base, *dims = arguments(node)
    rank = len(shape_of(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in dims[0]]
    elif rank > 1:
        a, b = (d % rank for d in dims) if dims else (0, 1)
        order[a], order[b] = order[b], order[a]
    part = Band(order[band.dim], band.start, band.stop)
    return same(node, [(base, part)])


def _unsqueeze(node: fx.Node, band: Band) -> Piece | None:
    base, dim = arguments(node)
    at = dim % len(shape_of(node))
    if band.dim == at:
        return None
    return same(node, [(base, Band(band.dim - (band.dim > at), band.start, band.stop))])


def _cat(node: fx.Node, band: Band) -> Piece | None:
    parts, dim = arguments(node, (None, 0))
    if dim % len(shape_of(node)) == band.dim:
        return None
    return same(node, [(n, band) for n in dict.fromkeys(parts)])


def _slice(node: fx.Node, band: Band) -> Piece | None:
    x, dim, start, stop, step = arguments(node, (None, 0, None, None, 1))
    at, size = dim % len(shape_of(x)), shape_of(x)[dim]
    if band.dim != at:
        return same(node, [(x, band)])
    first, _, by = slice(start, stop, step).indices(size)
    if by != 1:
        return None
    need: Need = x, Band(at, first + band.start, first + band.stop)
    return Piece((need,), lambda tile: tile.get(need))


def _along(place: int, default: Any = None, *, keeps: bool = True) -> CutRule:
    """Return the rule of operations along dimensions of the first argument, which argument `place` names.
    `keeps`: whether the result has as many dimensions, unless argument ``place + 1`` says that a reduction
    keeps its own."""
    def rule(node: fx.Node, band: Band) -> Piece | None:
        args = arguments(node)
        given: Any = args[place] if len(args) > place else default
        rank = len(shape_of(args[0]))
        dims = {d % rank for d in (given if isinstance(given, (list, tuple)) else [given])}
        dim = band.dim
        if not keeps and not (len(args) > place + 1 and args[place + 1] is True):
            dim = [d for d in range(rank) if d not in dims][band.dim]
        if not dims or dim in dims:
            return None
        return same(node, [(args[0], Band(dim, band.start, band.stop))])
    return rule


def _item(node: fx.Node, band: Band) -> Piece | None:
    base: Any = node.args[0]
    k: Any = node.args[1]
    if k and base.target not in EVEN:
        return None                                         # statistics, places of maxima
    need: Need = base, band
    if base.target in SUMS and not isinstance(base.meta[VALUE], torch.Tensor):
        return None

    def write(tile: Write) -> fx.Node:
        made = tile.get(need)
        return made[k] if isinstance(made, tuple) else tile.call(operator.getitem, made, k)

    return Piece((need,), write)


EVEN = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
"""Operations whose results all have the first one's dimensions."""

RULES: dict[Any, CutRule] = {
    **windows.RULES,
    aten._prelu_kernel.default: _pointwise, aten.hardswish.default: _pointwise,
    aten.native_layer_norm.default: _layer_norm, aten.native_group_norm.default: _group_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.native_batch_norm.default: _batch_norm, aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.mm.default: _product, aten.addmm.default: _product, aten.bmm.default: _product,
    aten.baddbmm.default: _product, aten.embedding.default: _embedding,
    aten.view.default: _view, aten._unsafe_view.default: _view, aten.reshape.default: _view,
    aten.expand.default: _expand, aten.unsqueeze.default: _unsqueeze,
    aten.t.default: _permute, aten.transpose.int: _permute, aten.permute.default: _permute,
    aten.squeeze.dim: _along(1, keeps=False), aten.squeeze.dims: _along(1, keeps=False),
    aten.cat.default: _cat, aten.slice.Tensor: _slice, aten.select.int: _along(1, keeps=False),
    aten.split.Tensor: _along(2, 0), aten.split_with_sizes.default: _along(2, 0),
    aten.unbind.int: _along(1, 0, keeps=False),
    aten.clone.default: _pointwise, aten._to_copy.default: _pointwise, aten.zeros_like.default: _pointwise,
    aten.ones_like.default: _pointwise, aten.full_like.default: _pointwise,
    aten._softmax.default: _along(1), aten._log_softmax.default: _along(1), aten.cumsum.default: _along(1),
    aten.sum.dim_IntList: _along(1, keeps=False), aten.mean.dim: _along(1, keeps=False),
    aten.amax.default: _along(1, (), keeps=False), aten.amin.default: _along(1, (), keeps=False),
    aten.logsumexp.default: _along(1, keeps=False), aten.glu.default: _along(1, -1),
    operator.getitem: _item,
}
"""Rules of operators; other pointwise operators have the one of all pointwise operators."""


# -- Sums ------------------------------------------------------------------------------------------


def _sum(node: fx.Node, band: Band) -> Piece | None:
    """Return a part's sum, or its part of the mean of all."""
    x: Any = node.args[0]
    dims, keep = arguments(node, (None, None, False))[1:3]
    rank = len(shape_of(x))
    over = [d % rank for d in (dims if isinstance(dims, (list, tuple)) and dims else range(rank))]
    if band.dim not in over:
        return None
    need: Need = x, band
    count = math.prod(shape_of(x)[d] for d in over) if node.target in _MEANS else None

    def write(tile: Write) -> fx.Node:
        made = tile.call(aten.sum.dim_IntList, tile.get(need), over, bool(keep), **node.kwargs)
        return made if count is None else tile.call(aten.div.Scalar, made, count)

    return Piece((need,), write)


_MEANS = (aten.mean.default, aten.mean.dim)
_EACH, _MEAN, _SUM = 0, 1, 2
"""Results of losses: one for each element, their mean or their sum."""


def _loss(place: int) -> CutRule:
    """Make the rule of a loss whose argument `place` says whether it is a mean or a sum."""
    def rule(node: fx.Node, band: Band) -> Piece | None:
        args = arguments(node)
        reduction = args[place] if len(args) > place else _MEAN
        first: Any = args[0]
        shape = shape_of(first)
        if reduction == _EACH or any(shape_of(n) != shape for n in args[:2]) or node.kwargs \
                or any(isinstance(n, fx.Node) for n in args[2:]):
            return None
        now = [*args, *[None] * (place + 1 - len(args))]
        now[place] = _SUM
        needs = [(n, band) for n in dict.fromkeys(args[:2])]

        def write(tile: Write) -> fx.Node:
            given = fx.node.map_arg(tuple(now), lambda n: tile.get((n, band)))
            made = tile.call(node.target, *given)
            return tile.call(aten.div.Scalar, made, math.prod(shape)) if reduction == _MEAN else made

        return Piece(tuple(needs), write)
    return rule


def _nll(node: fx.Node, band: Band) -> Piece | None:
    """Return a part's share of a negative log likelihood: how many targets count is known before."""
    scores, target, weight, reduction, ignored = arguments(node)
    dim = band.dim - (band.dim > 0)
    if reduction == _EACH or weight is not None or band.dim == 1:
        return None
    part: Need = target, Band(dim, band.start, band.stop)
    of_scores: Need = scores, band
    whole: Need = target, None
    dtype = value_of(scores).dtype

    def write(tile: Write) -> tuple[fx.Node, ...]:
        made = tile.call(node.target, tile.get(of_scores), tile.get(part), None, _SUM, ignored)
        loss = tile.call(operator.getitem, made, 0)
        if reduction == _SUM:
            return (loss,)
        counted = tile.call(aten.sum.default, tile.call(aten.ne.Scalar, tile.get(whole), ignored))
        return (tile.call(aten.div.Tensor, loss, tile.call(aten._to_copy.default, counted, dtype=dtype)),)

    return Piece((of_scores, part, *((whole,) if reduction == _MEAN else ())), write)


def _contracted(node: fx.Node, band: Band) -> Piece | None:
    """Return the product of some columns with as many rows, and a part's share of the bias."""
    *bias, a, b = arguments(node)
    if band.dim != 1 or a is b or a in bias or b in bias:
        return None
    of_a, of_b = (a, band), (b, Band(0, band.start, band.stop))
    share = len(band) / shape_of(a)[1]

    def write(tile: Write) -> fx.Node:
        added = [tile.call(aten.mul.Scalar, tile.get((n, None)), share) for n in bias]
        return tile.call(node.target, *added, tile.get(of_a), tile.get(of_b), **node.kwargs)

    return Piece((of_a, of_b, *((n, None) for n in bias)), write)


def summed(node: fx.Node) -> Any:
    """Return the operand of a sum that is cut along what is summed up."""
    return node.args[1 if node.target is aten.addmm.default else 0] if node.args else None


SUMS: dict[Any, CutRule] = {
    aten.mm.default: _contracted, aten.addmm.default: _contracted,
    aten.sum.default: _sum, aten.mean.default: _sum, aten.sum.dim_IntList: _sum, aten.mean.dim: _sum,
    aten.mse_loss.default: _loss(2), aten.smooth_l1_loss.default: _loss(2),
    aten.binary_cross_entropy_with_logits.default: _loss(4),
    aten.nll_loss_forward.default: _nll, aten.nll_loss2d_forward.default: _nll,
}
"""Rules of sums over the dimension that is cut: the parts' results are added up."""
