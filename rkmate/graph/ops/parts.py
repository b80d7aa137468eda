"""Parts that operators work on one after the other, and how many bytes they have.

An operator that works on a few rows (or channels) at a time has temporaries as large as one part, which stay
in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rkmate import device as devices

Tensors = Sequence[torch.Tensor]


def part_bytes(like: torch.Tensor, total: int) -> int:
    """Return about how many bytes of `total` to work on at a time; all bytes on the meta device."""
    return total if like.is_meta else devices.of(like).part_bytes(total)


def stretches(length: int, total: int, part: int) -> Iterator[slice]:
    """Yield slices of a dimension with `length` indices and `total` bytes, about `part` bytes each."""
    step = rows_of(length, total, part)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def rows_of(length: int, total: int, part: int) -> int:
    """Return how many of `length` indices, which take `total` bytes, take about `part` bytes."""
    return max(1, length * part // max(1, total))


def bytes_of_part(value: torch.Tensor, dim: int) -> int:
    """Return bytes of what is worked on at a time where a dimension is cut."""
    step = min(value.shape[dim], rows_of(value.shape[dim], value.nbytes, part_bytes(value, value.nbytes)))
    return step * (value.nbytes // max(1, value.shape[dim]))


def bytes_of_copies(inputs: Tensors) -> int:
    """Return bytes of the operands that a kernel copies, as it wants them contiguous."""
    return sum(t.nbytes for t in inputs if not t.is_contiguous())
