"""Parts of tensors: those that operators work on one after the other, how many bytes they have, and operators
that write to one.

An operator that works on a few rows (or channels) at a time has temporaries as large as one part, which stay
in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rkmate import device as devices
from rkmate.torch_seam.own import OwnOperator, own_operator, register

aten = torch.ops.aten

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


# -- Writing to a part -----------------------------------------------------------------------------
#
# A trace has no writes in place: a forward that fills a tensor column by column becomes a chain of copies of
# the whole tensor, each with another column in it. These operators write to the tensor itself.

_PARTS: dict[Any, tuple[Any, str]] = {
    aten.select_scatter.default: (aten.select.int, "int dim, SymInt index"),
    aten.slice_scatter.default: (
        aten.slice.Tensor, "int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1"),
    aten.diagonal_scatter.default: (aten.diagonal.default, "int offset=0, int dim1=0, int dim2=1"),
}
"""The view that each operator of torch writes to in a copy, and the arguments that say where it is."""


def _write_to(view: Any) -> Callable[..., torch.Tensor]:
    def write(into: torch.Tensor, values: torch.Tensor, *place: Any, **named: Any) -> torch.Tensor:
        view(into, *place, **named).copy_(values)
        return into

    return write


def _name(operator: Any) -> str:
    return str(operator.overloadpacket.__name__) + "_"


register([OwnOperator(f"{_name(scatter)}(Tensor(a!) into, Tensor values, {place}) -> Tensor(a!)",
                      _write_to(view), direct=True) for scatter, (view, place) in _PARTS.items()])
WRITES = {scatter: own_operator(_name(scatter)) for scatter in _PARTS}
"""Operators that write to a part of their first operand, by the operator of torch that writes to a copy."""
