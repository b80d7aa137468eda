"""An emission pass: the other kernels of operations that work part by part.

The operation in the graph is the leanest. Which kernel runs is chosen at each step of a schedule, where it
is known how much room there is (`rkmate.ir.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.chunked_kernels import Alternative, whole_batch_norm
from rkmate.graph.passes.chunked_loss import fewer_parts

own = torch.ops.rkmate

KERNELS: Mapping[Any, Callable[[fx.Node], tuple[Alternative, ...]]] = {
    own.batch_norm_backward.default: whole_batch_norm,
    own.linear_cross_entropy.default: fewer_parts,
    own.linear_cross_entropy_backward.default: fewer_parts,
}
"""What names them, by operator. The parts of a plain cross entropy are as fast as torch's kernel."""


def alternatives(node: fx.Node) -> tuple[Alternative, ...]:
    """The other kernels of an operation, the leanest first; none where it has one alone."""
    find = KERNELS.get(node.target)
    return () if find is None else find(node)
