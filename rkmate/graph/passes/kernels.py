"""Other kernels of an operation that works part by part: larger parts.

The graph contains the variant that needs the least memory. The kernel is chosen at each step of a schedule,
where the free memory is known (`rkmate.ir.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.norms import BATCH_NORM_BACKWARD
from rkmate.graph.passes.tiles.tiled import InTiles
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


@dataclass(frozen=True)
class Alternative:
    """Another kernel of an operation that works part by part: fewer and larger parts, more memory."""

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


KERNELS: Mapping[Any, Callable[[fx.Node], tuple[Alternative, ...]]] = {
    BATCH_NORM_BACKWARD: whole_batch_norm,
}
"""Functions that return the alternatives, by operator. The parts of a plain cross entropy are as fast as
torch's kernel."""
FEWER = 4
"""Factor between the parts of one alternative and the next: a useful difference."""


def alternatives(node: fx.Node) -> tuple[Alternative, ...]:
    """Return the other kernels of an operation, the smallest memory first; none if it has only one."""
    if isinstance(node.target, InTiles):
        return _of_tiles(node, node.target)
    find = KERNELS.get(node.target)
    return () if find is None else find(node)


def _of_tiles(node: fx.Node, tiled: InTiles) -> tuple[Alternative, ...]:
    """Return the operation in fewer tiles."""
    found: list[InTiles] = []
    with node.all_input_nodes[0].meta[VALUE].fake_mode:
        while (fewer := (found[-1] if found else tiled).fewer(FEWER)) is not None:
            found.append(fewer)
    return tuple(Alternative(t, node.args, t.tile_bytes(lambda n: 0)) for t in found)
