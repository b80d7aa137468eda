"""How a value holds the rows that a region is cut along."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from rkmate.torch_seam.nodes import VALUE

WHOLE = 0
"""The form of a value that is the same for all rows."""
TURNED = -1
"""The form of a matrix whose last dimension are the rows. Any other form is how many leading dimensions are
the rows: 2 of ``[batch, time, width]``."""


def lead_of(shape: Sequence[int], rows: int) -> int | None:
    """How many leading dimensions are the rows, at least; None where none are."""
    count = 1
    for k, size in enumerate(shape, 1):
        count *= size
        if count == rows:
            return k
    return None


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a node's value, of the first of several; None for what is no tensor."""
    value = node.meta.get(VALUE)
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def aligned(shape: Sequence[int], result: Sequence[int], rows: int, form: int) -> int | None:
    """The form of an operand that is broadcast to a result of a form; None where it has a part of the
    rows' dimensions."""
    if form == TURNED:
        return TURNED if tuple(shape) == tuple(result) else WHOLE if math.prod(shape) == 1 else None
    full = (1,) * (len(result) - len(shape)) + tuple(shape)
    if full[:form] == tuple(result[:form]):
        return lead_of(shape, rows)
    return WHOLE if all(size == 1 for size in full[:form]) else None


def row_numel(node: fx.Node, rows: int) -> int:
    """Numbers of a value per row."""
    return math.prod(shape_of(node) or (0,)) // rows
