"""A rewriting pass: wide MLPs. A product, what is done to each number of its result, and a product back, a
few rows at a time.

Between the two products of a transformer's MLP a token takes some four times what it takes elsewhere. In
tiles, what a block works with does not grow with the sequence, but for its inputs and results. The backward
computes the first products again; the gradients are exact, but the weights' are added up in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.chunked_kernels import is_wide
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.graph.passes.tiles.heads import weight_of
from rkmate.graph.passes.tiles.region import Region, grow, seeds_of
from rkmate.graph.passes.tiles.rewrite import late_nodes, tile
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)
ROWS = 256
"""Of a tile, at least: with as many, adding up the weights' gradients is a small share of the products."""
MOST_PARTS = 256


def tile_mlps(work: Joint) -> None:
    """Note the weights of wide MLPs; let the MLPs run a few rows at a time where that is asked for."""
    found = seeds_of(work.graph, _is_seed, lambda seed: _region(work, seed))
    names = [work.name(weight_of(seed)) for seed in found]
    if "tiled-mlps" in work.choices:
        names = [name for name, seed in zip(names, found, strict=True)
                 if (region := _region(work, seed)) is not None
                 and tile(work, region, "mlp", parts_of(region), in_forward=False)]
    work.concerned["tiled-mlps"] = tuple(dict.fromkeys(names))


def parts_of(region: Region) -> int:
    """In how many tiles a region runs: as many as have enough rows."""
    return max(1, min(MOST_PARTS, region.rows // ROWS))


def _is_seed(node: fx.Node) -> bool:
    if node.target not in _PRODUCTS or is_backward(node) or not is_wide(node.meta[VALUE], 0):
        return False
    x: Any = node.args[-2]
    rows, width = node.meta[VALUE].shape
    return bool(width > x.meta[VALUE].shape[1] and rows >= 2 * ROWS)


def _region(work: Joint, seed: fx.Node) -> Region | None:
    """The region of an MLP; None where the product is none's: no product leads back to narrow values, or a
    wide one is read by others (an attention's queries, what dropout draws for)."""
    late = late_nodes(work)
    region = grow(seed)
    if any(region.wide(n) and n not in region.sums for n in region.results(work.results())) \
            or any(form != 0 and n not in region.forms and region.wide(n)
                   for made in region.forms for n, form in region.needs(made).items()):
        return None
    back = [n for n in region.forms if n not in late and n.target in _PRODUCTS and not region.wide(n)]
    return region if back else None
