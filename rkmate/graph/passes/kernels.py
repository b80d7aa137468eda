"""Other kernels of an operation: larger parts of an operation that works part by part, and products by
another library.

The graph contains the variant that needs the least memory. The kernel is chosen at each step of a schedule,
where the free memory is known (`rkmate.ir.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.device import onednn
from rkmate.graph.ops.norms import BATCH_NORM_BACKWARD
from rkmate.graph.ops.products import BY_ONEDNN, PRODUCT
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.tiles.source import products
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


@dataclass(frozen=True)
class Alternative:
    """A further kernel of an operation. For an operation that works part by part: fewer and larger parts,
    more memory. For a product: another library's kernel."""

    target: Any
    """The operator."""
    args: tuple[Any, ...]
    overhead: int
    """Bytes of temporary memory, at most."""


def whole_batch_norm(node: fx.Node) -> tuple[Alternative, ...]:
    """Return torch's call for the gradients of a batch norm, with the same bits: it allocates the first of
    them twice, and overwrites nothing."""
    grad, input, weight, mean, invstd, eps = node.args
    value = input.meta[VALUE]  # type: ignore[union-attr]
    return (Alternative(aten.native_batch_norm_backward.default,
                        (grad, input, weight, None, None, mean, invstd, True, eps, [True] * 3),
                        value.numel() * value.element_size()),)


# -- Products by either of two libraries -----------------------------------------------------------
#
# On a CPU torch multiplies matrices of single precision by MKL and convolves by oneDNN, which multiplies as
# well. On some processors it takes a tenth less time, on others more; the last bits differ. Where groups are
# compiled, both are measured, and each product of a schedule runs by the one that is faster there.

LEAST = 16
"""Rows, columns and what is summed up: of fewer, no library takes long."""


def name_products(joint: Joint) -> None:
    """Let products be the operator that has both kernels, where both are there."""
    if not onednn.is_available():
        return
    for node in joint.graph.nodes:
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
    """Return the tiled computation with its products named; products that are added to their sum in place
    stay unchanged."""
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
    """Return a product by the other library."""
    a: torch.Tensor = node.args[0].meta[VALUE]  # type: ignore[union-attr]
    return (Alternative(BY_ONEDNN, node.args, onednn.temporary_bytes(a)),)


def by_onednn_in_tiles(tiled: Tiled) -> Tiled | None:
    """Return a tiled computation whose products run by the other library; None if it has none."""
    if all(n.target is not PRODUCT for n in tiled.graph.nodes):
        return None
    made = tiled.with_parts(tiled.parts)
    for node in made.graph.nodes:
        if node.target is PRODUCT:
            node.target = BY_ONEDNN
    return made


# -- All of them -----------------------------------------------------------------------------------

KERNELS: Mapping[Any, Callable[[fx.Node], tuple[Alternative, ...]]] = {
    BATCH_NORM_BACKWARD: whole_batch_norm,
    PRODUCT: by_onednn,
}
"""Functions that return the alternatives, by operator. The parts of a plain cross entropy are as fast as
torch's kernel."""
FEWER = 4
"""Factor between the parts of one alternative and the next: a useful difference."""


def alternatives(node: fx.Node) -> tuple[Alternative, ...]:
    """Return the other kernels of an operation, the smallest memory first; none if it has only one."""
    if isinstance(node.target, Tiled):
        return _of_tiles(node, node.target)
    find = KERNELS.get(node.target)
    return () if find is None else find(node)


def _of_tiles(node: fx.Node, tiled: Tiled) -> tuple[Alternative, ...]:
    """Return the tiled computation in fewer tiles, at least two; and each of these with products by another
    library."""
    found: list[Tiled | None] = []
    with node.all_input_nodes[0].meta[VALUE].fake_mode:
        found.append(by_onednn_in_tiles(tiled))
        while tiled.parts > 2:
            tiled = tiled.with_parts(max(2, tiled.parts // FEWER))
            found += [tiled, by_onednn_in_tiles(tiled)]
    return tuple(Alternative(t, node.args, t.tile_bytes(lambda n: 0)) for t in found if t is not None)
