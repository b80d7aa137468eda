"""Norms whose statistics mix what tiles cut: trained batch norms between images, group and instance norms
between the bands of one image.

A first pass over tiles computes mean and variance, a second one normalizes with them as with any other
operand. The passes are the whole's forward, and their derivatives its backward: the second pass has gradients
of the statistics, which enter the backward of the first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import shape_of, value_of
from rkmate.graph.passes.tiles.pieces import Band, Piece, Write

aten = torch.ops.aten


@dataclass(frozen=True)
class Norm:
    """A norm that computes statistics."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    groups: int | None = None
    """Number of groups of an image's channels; None for a batch norm, whose statistics are of all images."""
    momentum: float = 0.0
    running: tuple[fx.Node, fx.Node] | None = None
    """Running mean and variance, of which the norm returns new values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of mean and variance."""
        images, channels = shape_of(self.x)[:2]
        return (channels,) if self.groups is None else (images, self.groups)

    @property
    def count(self) -> int:
        """The number of values that each mean is of."""
        return math.prod(shape_of(self.x)) // math.prod(self.shape)

    def mixes(self, dim: int) -> bool:
        """Return whether statistics are of elements that differ in this dimension."""
        return dim > 1 or (dim == 0 and self.groups is None)


_BATCH_NORM = ("x", "weight", "bias", "mean", "variance", "training", "momentum", "eps")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    aten.native_group_norm.default: ("x", "weight", "bias", "images", "channels", "pixels", "groups", "eps"),
    aten._native_batch_norm_legit.no_stats: ("x", "weight", "bias", "training", "momentum", "eps"),
    aten._native_batch_norm_legit_functional.default: _BATCH_NORM,
    aten.native_batch_norm.default: _BATCH_NORM,
}


def norm_of(node: fx.Node) -> Norm | None:
    """Return the norm that an operation is, in the precision of its operand; None for another operation, and
    for norms whose statistics are known."""
    target: Any = node.target
    if node.op != "call_function" or target not in _ARGUMENTS:
        return None
    given: dict[str, Any] = dict(zip(_ARGUMENTS[target], node.args, strict=False))
    running = None if given.get("mean") is None else (given["mean"], given["variance"])
    dtype = value_of(given["x"]).dtype
    if not given.get("training", True) or (running and target is aten.native_batch_norm.default) \
            or dtype not in (torch.float32, torch.float64) \
            or any(value_of(n).dtype != dtype for n in node.all_input_nodes):
        return None
    return Norm(node, given["x"], given["weight"], given["bias"], given["eps"], given.get("groups"),
                given.get("momentum", 0.0), running)


# -- Passes ----------------------------------------------------------------------------------------


def normalized(node: fx.Node, band: Band) -> Piece | None:
    """Return a part of a norm's result, with statistics that are known."""
    norm = norm_of(node)
    if norm is None or not norm.mixes(band.dim):
        return None
    parameters = [n for n in (norm.weight, norm.bias) if n is not None]
    rank = len(shape_of(norm.x))

    def write(tile: Write) -> tuple[fx.Node]:
        known = tile.statistics(node)
        assert known is not None
        mean, variance = known
        scale = _spread(tile, norm, tile.call(
            aten.rsqrt.default, tile.call(aten.add.Scalar, variance, norm.eps)))
        weight, bias = (None if n is None else tile.call(
            aten.reshape.default, tile.get((n, None)), [-1, *[1] * (rank - 2)])
            for n in (norm.weight, norm.bias))
        if weight is not None:
            scale = tile.call(aten.mul.Tensor, scale, weight)
        made = tile.call(aten.mul.Tensor, _centred(tile, norm, tile.get((norm.x, band)), mean), scale)
        return (made if bias is None else tile.call(aten.add.Tensor, made, bias),)

    return Piece(((norm.x, band), *((n, None) for n in dict.fromkeys(parameters))), write, mixes=True)


def counted(node: fx.Node, band: Band) -> Piece | None:
    """Return what a part of a norm's operand adds to the sums that `finished` takes; with mean and variance
    known, to these two, in a form that has their derivatives."""
    norm = norm_of(node)
    if norm is None or not norm.mixes(band.dim):
        return None
    dims = [d for d in range(len(shape_of(norm.x))) if d > 1 or (d == 0 and norm.groups is None)]

    def write(tile: Write) -> tuple[fx.Node, fx.Node]:
        x, known = tile.get((norm.x, band)), tile.statistics(node)
        if known is not None:
            centred = _centred(tile, norm, x, known[0])
            sums = [tile.call(aten.sum.dim_IntList, v, dims)
                    for v in (x, tile.call(aten.mul.Tensor, centred, centred))]
            mean, variance = (tile.call(aten.div.Scalar, _grouped(tile, norm, v), norm.count) for v in sums)
            return mean, variance
        # A part's variance is about its own mean: sums of squares of the means lose nothing in double
        # precision.
        number = math.prod(shape_of(norm.x)[d] for d in dims) // shape_of(norm.x)[band.dim] * len(band)
        made = tile.call(aten.var_mean.correction, x, dims, correction=0)
        variance, mean = (tile.call(aten._to_copy.default, tile.call(operator.getitem, made, k),
                                    dtype=torch.float64) for k in range(2))
        square = tile.call(aten.add.Tensor, variance, tile.call(aten.mul.Tensor, mean, mean))
        first, second = (_grouped(tile, norm, tile.call(aten.mul.Scalar, v, number)) for v in (mean, square))
        return first, second

    return Piece(((norm.x, band),), write)


def _centred(tile: Write, norm: Norm, x: Any, mean: Any) -> fx.Node:
    return tile.call(aten.sub.Tensor, x, _spread(tile, norm, mean))


def _spread(tile: Write, norm: Norm, value: Any) -> fx.Node:
    """Return a statistic in a shape that is broadcast to images."""
    ones = [1] * (len(shape_of(norm.x)) - 2)
    if norm.groups is None:
        return tile.call(aten.reshape.default, value, [-1, *ones])
    images, channels = shape_of(norm.x)[:2]
    wide = tile.call(aten.expand.default, tile.call(aten.unsqueeze.default, value, 2),
                     [images, norm.groups, channels // norm.groups])
    return tile.call(aten.reshape.default, wide, [images, channels, *ones])


def _grouped(tile: Write, norm: Norm, value: Any) -> fx.Node:
    """Return sums of channels as sums of groups."""
    if norm.groups is None:
        return value  # type: ignore[no-any-return]
    return tile.call(aten.sum.dim_IntList, tile.call(aten.reshape.default, value, [*norm.shape, -1]), [2])


def finished(norm: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the function that makes mean and variance of the sums of values and of squares."""
    dtype = value_of(norm.x).dtype

    def finish(values: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = values / norm.count
        return mean.to(dtype), (squares / norm.count - mean * mean).clamp_min(0).to(dtype)

    return finish


def moved_on(norm: Norm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the function that makes new running statistics of the old ones, mean and variance."""
    def move(old_mean: torch.Tensor, old_variance: torch.Tensor, mean: torch.Tensor,
             variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        unbiased = variance * (norm.count / max(1, norm.count - 1))
        return tuple(old * (1 - norm.momentum) + new * norm.momentum      # type: ignore[return-value]
                     for old, new in ((old_mean, mean), (old_variance, unbiased)))

    return move
