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
from rkmate.torch_seam.own import Over, OwnOperator, own_operator, register

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

PARTS: dict[Any, tuple[Any, str]] = {
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
                      _write_to(view), direct=True) for scatter, (view, place) in PARTS.items()])
WRITES = {scatter: own_operator(_name(scatter)) for scatter in PARTS}
"""Operators that write to a part of their first operand, by the operator of torch that writes to a copy."""


# -- Writing to a part of a part -------------------------------------------------------------------
#
# In a trace, `x[:, t, :2] = y` writes to a copy of a row and this copy to a copy of the whole. Torch copies a
# part with its strides: the copy of a row of each image takes as many bytes as all images.

_DEFAULTS: dict[Any, tuple[int, ...]] = {
    aten.select.int: (0, 0), aten.slice.Tensor: (0, 0, 2 ** 63 - 1, 1), aten.diagonal.default: (0, 0, 1)}
"""Default arguments of each view. Their number tells the views apart in the steps of `write_part`."""
_VIEWS = {len(defaults): view for view, defaults in _DEFAULTS.items()}


def step_to_part(operator: Any, arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the numbers of a view of a part, or of the operator of torch that writes to it: how many
    arguments without tensors it has, and these. None for another operator."""
    defaults = _DEFAULTS.get(PARTS[operator][0] if operator in PARTS else operator)
    if defaults is None:
        return None
    given = (*arguments, *[None] * (len(defaults) - len(arguments)))
    return (len(defaults), *(default if value is None else value
                             for value, default in zip(given, defaults, strict=True)))


def _write_part_in_place(into: torch.Tensor, values: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    part, left = into, list(steps)
    while left:
        n = left.pop(0)
        part, left = _VIEWS[n](part, *left[:n]), left[n:]
    part.copy_(values)
    return into


def _write_part(into: torch.Tensor, values: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    return _write_part_in_place(into.clone(), values, steps)


register([
    OwnOperator("write_part(Tensor into, Tensor values, int[] steps) -> Tensor", _write_part,
                in_place=Over("write_part_", 0)),
    OwnOperator("write_part_(Tensor(a!) into, Tensor values, int[] steps) -> Tensor(a!)",
                _write_part_in_place, direct=True)])
WRITE_PART = own_operator("write_part")
"""Writes to a part of a copy. The part is the end of several steps (`step_to_part`), one after the other."""
