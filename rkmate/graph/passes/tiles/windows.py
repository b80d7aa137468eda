"""How operations that look at neighbours treat a dimension that is cut: convolutions, pooling, interpolation,
pixel shuffles and padding. A part of the result needs what its windows see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.passes.joint import arguments, shape_of, value_of
from rkmate.graph.passes.tiles.pieces import Band, CutRule, Need, Piece, Write, same

aten = torch.ops.aten


def _per_dim(given: Any, count: int) -> list[int]:
    numbers = list(given) if isinstance(given, (list, tuple)) else [given]
    return numbers * count if len(numbers) == 1 else numbers


def _window(size: int, band: Band, stride: int, padding: int, reach: int) -> tuple[int, int, int, int]:
    """Return the range of an operand of `size` that a range of the result sees through windows of `reach`,
    and the padding before and after it."""
    low, high = band.start * stride - padding, (band.stop - 1) * stride - padding + reach
    start, stop = max(low, 0), min(high, size)
    return start, stop, start - low, high - stop


def _padded(tile: Write, x: Any, rank: int, dim: int, before: int, after: int, value: float) -> Any:
    pads = [0] * (2 * (rank - dim))
    pads[-2:] = before, after
    return tile.call(aten.constant_pad_nd.default, x, pads, value)


# -- Convolutions ----------------------------------------------------------------------------------


def _convolution(node: fx.Node, band: Band) -> Piece | None:
    x, weight, _, stride, padding, dilation, transposed, output_padding, _ = arguments(node)
    rank, k = len(shape_of(x)), max(0, band.dim - 2)
    if band.dim == 1:
        return None
    strides, pads, steps, extra = (_per_dim(a, rank - 2) for a in (stride, padding, dilation, output_padding))
    need, before, after = (x, band), pads[0], pads[0]
    if band.dim:
        size, reach = shape_of(x)[band.dim], (shape_of(weight)[band.dim] - 1) * steps[k] + 1
        if transposed:
            return _transposed(node, band, strides, pads, extra, reach)
        start, stop, before, after = _window(size, band, strides[k], pads[k], reach)
        if stop <= start:
            return None
        need = x, Band(band.dim, start, stop)
    in_layers = band.dim in (0, 2) and small_volume(node, need[1])
    if band.dim == 0 and not in_layers:
        return same(node, [need])

    def write(tile: Write) -> fx.Node:
        part, now = tile.get(need), list(pads)
        now[k] = before if before == after and not in_layers else 0
        if before > now[k] or after > now[k]:
            part = _padded(tile, part, rank, max(band.dim, 2), before, after, 0.0)
        args: list[Any] = [tile.get((n, None)) if isinstance(n, fx.Node) else n for n in node.args[1:]]
        args[2:5] = strides, now, steps
        return _by_layers(tile, node, part, args, len(band) if band.dim else shape_of(node)[2]) \
            if in_layers else tile.call(node.target, part, *args)

    return Piece((need, *((n, None) for n in node.args[1:3] if isinstance(n, fx.Node))), write)


SMALL_VOLUME = 20480
"""Elements of the first four dimensions up to which torch does not hand a convolution of a volume to oneDNN
on a CPU."""


def small_volume(node: fx.Node, band: Band) -> bool:
    """Return whether torch's own kernel computes a convolution on a CPU if it has but a part of its operand:
    a kernel that lays the windows of all points side by side."""
    x, weight = list(shape_of(node.args[0])), shape_of(node.args[1])
    x[band.dim] = len(band)
    value: torch.Tensor = value_of(node)
    return len(x) == 5 and x[0] == 1 and math.prod(weight[2:]) > 1 \
        and not (node.args[6] or node.args[8] != 1) and math.prod(x[:4]) <= SMALL_VOLUME \
        and bool(value.dtype == torch.float32) and devices.of(value).cpu_kernels


def _by_layers(tile: Write, node: fx.Node, part: Any, args: Sequence[Any], layers: int) -> fx.Node:
    """Write the convolution of a small volume as the one of its layers, each of which has the layers that its
    windows see as further channels: with fewer windows side by side. `layers`: of the result."""
    weight, bias, strides, pads, steps = args[:5]
    made, channels, depth, *kernel = shape_of(node.args[1])
    images = tile.call(aten.transpose.int, tile.call(aten.squeeze.dim, part, 0), 0, 1)
    seen = [tile.call(aten.slice.Tensor, images, 0, start, start + strides[0] * (layers - 1) + 1, strides[0])
            for start in range(0, depth * steps[0], steps[0])]
    wide = tile.call(aten.reshape.default, tile.call(aten.permute.default, weight, [0, 2, 1, 3, 4]),
                     [made, depth * channels, *kernel])
    found = tile.call(node.target, tile.call(aten.cat.default, seen, 1), wide, bias, strides[1:], pads[1:],
                      steps[1:], False, [0, 0], 1)
    return tile.call(aten.unsqueeze.default, tile.call(aten.transpose.int, found, 0, 1), 0)


def windows_bytes(node: fx.Node, band: Band, *, cut: bool) -> float:
    """Return the bytes of the windows that a convolution lays side by side for a part of its operand. `cut`:
    whether it is written for parts."""
    if node.target is not aten.convolution.default or not small_volume(node, band):
        return 0.0
    value: torch.Tensor = value_of(node)
    _, channels, *kernel = shape_of(node.args[1])
    across = kernel[0] if cut and band.dim in (0, 2) else math.prod(kernel)
    return channels * across * value[:, :1].numel() * value.element_size() * len(band) / shape_of(
        node.args[0])[band.dim]


def _part_of(tile: Write, made: fx.Node, band: Band, offset: int, length: int) -> fx.Node:
    """Return what belongs to a part of a result: of `length` elements, those from `offset` on."""
    return made if (offset, len(band)) == (0, length) else tile.call(
        aten.slice.Tensor, made, band.dim, offset, offset + len(band))


def _transposed(node: fx.Node, band: Band, strides: list[int], pads: list[int], extra: list[int],
                reach: int) -> Piece | None:
    """Return a transposed convolution for a part of its result: what reaches into the part, without what lies
    around it."""
    x: Any = node.args[0]
    k = band.dim - 2
    first, last = band.start + pads[k], band.stop - 1 + pads[k]             # without padding taken off
    # The first element that reaches into the part; between short windows, the one before it.
    start = max(0, min(-(-(first - reach + 1) // strides[k]), first // strides[k]))
    stop = min(shape_of(x)[band.dim], last // strides[k] + 1)
    if stop <= start:
        return None
    need: Need = x, Band(band.dim, start, stop)
    more = max(0, last + 1 - ((stop - 1) * strides[k] + reach))
    if more and more >= strides[k]:
        return None

    def write(tile: Write) -> fx.Node:
        args: list[Any] = [tile.get((n, None)) if isinstance(n, fx.Node) else n for n in node.args[1:]]
        args[3], args[6] = list(pads), list(extra)
        args[3][k], args[6][k] = 0, more
        made = tile.call(node.target, tile.get(need), *args)
        offset, whole = first - start * strides[k], (stop - start - 1) * strides[k] + reach + more
        return _part_of(tile, made, band, offset, whole)

    return Piece((need, *((n, None) for n in node.args[1:3] if isinstance(n, fx.Node))), write)


# -- Pooling, interpolation, padding ---------------------------------------------------------------


_MAXIMA = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
_VOLUMES = (aten.max_pool3d_with_indices.default, aten.avg_pool3d.default)


def _pool(node: fx.Node, band: Band) -> Piece | None:
    """Cut a pooling; averages without padding at the part's edges, and in whole windows only."""
    maxima, count = node.target in _MAXIMA, 3 if node.target in _VOLUMES else 2
    x, kernel, stride, padding, *rest = arguments(node, (None, None, (), 0, *(
        (1, False) if maxima else (False, True, None))))
    shape = shape_of(x)
    k = band.dim - (len(shape) - count)
    if k < 0:
        return same(node, [(x, band)])
    sizes, pads = _per_dim(kernel, count), _per_dim(padding, count)
    strides = _per_dim(stride, count) if stride else sizes
    steps = _per_dim(rest[0], count) if maxima else [1] * count
    start, stop, before, after = _window(shape[band.dim], band, strides[k], pads[k],
                                         (sizes[k] - 1) * steps[k] + 1)
    if stop <= start or not (value_of(x).is_floating_point() if maxima else not (before or after or rest[0])):
        return None
    need: Need = x, Band(band.dim, start, stop)

    def write(tile: Write) -> fx.Node:
        part, now = tile.get(need), list(pads)
        now[k] = 0
        if before or after:
            part = _padded(tile, part, len(shape), band.dim, before, after, -math.inf)
        return tile.call(node.target, part, sizes, strides, now, steps if maxima else rest[0], *rest[1:])

    return Piece((need,), write)


def _by_images(node: fx.Node, band: Band) -> Piece | None:
    """Cut what works on each image of a batch by itself (or on each channel, adaptive pooling)."""
    return same(node, [(node.all_input_nodes[0], band)]) if band.dim == 0 else None


def _upsampled(count: int, *, reach: int) -> CutRule:
    """Make the rule of an interpolation between pixels that are `reach` apart, at multiples of the size."""
    def rule(node: fx.Node, band: Band) -> Piece | None:
        x: Any = node.args[0]
        size: Any = node.args[1]
        shape, k = shape_of(x), band.dim - (len(shape_of(x)) - count)
        if k < 0:
            return same(node, [(x, band)])
        factor, left = divmod(size[k], shape[band.dim])
        if left or (reach and node.args[2]):                # corners are aligned
            return None
        start = max(0, band.start // factor - reach)
        stop = min(shape[band.dim], (band.stop - 1) // factor + 1 + reach)
        need: Need = x, Band(band.dim, start, stop)

        def write(tile: Write) -> fx.Node:
            now = list(size)
            now[k] = (stop - start) * factor
            aligned = [node.args[2]] if reach else []
            made = tile.call(node.target, tile.get(need), now, *aligned, *[None] * count)
            return _part_of(tile, made, band, band.start - start * factor, now[k])

        return Piece((need,), write)
    return rule


def _pixel_shuffle(node: fx.Node, band: Band) -> Piece | None:
    x: Any = node.args[0]
    factor: Any = node.args[1]
    rank = len(shape_of(x))
    if band.dim < rank - 3:
        return same(node, [(x, band)])
    if band.dim == rank - 3:
        return None
    start, stop = band.start // factor, (band.stop - 1) // factor + 1
    need: Need = x, Band(band.dim, start, stop)

    def write(tile: Write) -> fx.Node:
        made = tile.call(node.target, tile.get(need), factor)
        return _part_of(tile, made, band, band.start - start * factor, (stop - start) * factor)

    return Piece((need,), write)


def _pixel_unshuffle(node: fx.Node, band: Band) -> Piece | None:
    x: Any = node.args[0]
    factor: Any = node.args[1]
    rank = len(shape_of(x))
    if band.dim == rank - 3:
        return None
    by = factor if band.dim > rank - 3 else 1
    return same(node, [(x, Band(band.dim, band.start * by, band.stop * by))])


def _pad(node: fx.Node, band: Band) -> Piece | None:
    x, pads, value = arguments(node, (None, None, 0.0))
    k = 2 * (len(shape_of(node)) - 1 - band.dim)
    if k >= len(pads) or not (pads[k] or pads[k + 1]):
        return same(node, [(x, band)])
    start, stop, before, after = _window(shape_of(x)[band.dim], band, 1, pads[k], 1)
    now = [*pads[:k], before, after, *pads[k + 2:]]
    return same(node, [(x, Band(band.dim, start, stop))], args=(x, now, value)) if stop > start else None


RULES: dict[Any, CutRule] = {
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _pool, aten.max_pool3d_with_indices.default: _pool,
    aten.avg_pool2d.default: _pool, aten.avg_pool3d.default: _pool,
    aten._adaptive_avg_pool2d.default: _by_images, aten._adaptive_avg_pool3d.default: _by_images,
    aten.upsample_nearest2d.default: _upsampled(2, reach=0),
    aten.upsample_nearest3d.default: _upsampled(3, reach=0),
    aten.upsample_bilinear2d.default: _upsampled(2, reach=1),
    aten.upsample_trilinear3d.default: _upsampled(3, reach=1),
    aten.pixel_shuffle.default: _pixel_shuffle, aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.constant_pad_nd.default: _pad,
}
"""Rules of operators."""
