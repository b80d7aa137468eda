"""A rewriting pass: products of matrices that may run by either of two libraries.

On a CPU torch multiplies matrices of single precision by MKL and convolves by oneDNN, which multiplies as
well. On some processors it takes a tenth less time, on others more; the last bits differ. Where groups are
compiled, both are measured, and each product of a schedule runs by the one that is faster there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.device import onednn
from rkmate.graph.ops.products import BY_ONEDNN, PRODUCT
from rkmate.graph.passes.chunked_kernels import Alternative
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.tiles.source import products
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

LEAST = 16
"""Rows, columns and what is summed up: of fewer, no library takes long."""


def name_products(work: Joint) -> None:
    """Let products be the operator that has both kernels, where both are there."""
    if not onednn.is_available():
        return
    for node in work.graph.nodes:
        if isinstance(node.target, Tiled):
            node.target = _named_in_tiles(node.target)
        else:
            _name(node)


def _name(node: fx.Node) -> None:
    args: list[Any] = list(node.args)
    if node.target is aten.mm.default:
        args.append(None)
    elif node.target is aten.addmm.default and not node.kwargs and args[0].meta[VALUE].dim() == 1:
        args = [*args[1:], args[0]]
    else:
        return
    if _is_large(node, *args[:2]):
        node.target, node.args = PRODUCT, tuple(args)


def _named_in_tiles(tiled: Tiled) -> Tiled:
    """The same; products that are added where their sum stands stay what they are."""
    made = tiled.with_parts(tiled.parts)
    added = set(products(made).values())
    for node in made.graph.nodes:
        if node not in added:
            _name(node)
    return made


def _is_large(node: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    values = [n.meta[VALUE] for n in (node, a, b)]
    return all(v.dtype is torch.float32 and devices.of(v).cpu_kernels for v in values) \
        and min(*values[0].shape, values[1].shape[1]) >= LEAST


def by_onednn(node: fx.Node) -> tuple[Alternative, ...]:
    """A product by the other library."""
    a: torch.Tensor = node.args[0].meta[VALUE]  # type: ignore[union-attr]
    return (Alternative(BY_ONEDNN, node.args, onednn.temporary_bytes(a)),)


def by_onednn_in_tiles(tiled: Tiled) -> Tiled | None:
    """A tiled computation whose products run by the other library; None where it has none."""
    if all(n.target is not PRODUCT for n in tiled.graph.nodes):
        return None
    made = tiled.with_parts(tiled.parts)
    for node in made.graph.nodes:
        if node.target is PRODUCT:
            node.target = BY_ONEDNN
    return made
