"""Values that replace tensors that were not computed or not kept: an operation only needs their form and
their range."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from rkmate.graph.ops.properties import COUNT_FROM_ONE, EMPTY
from rkmate.ir.cd import DKind
from rkmate.torch_seam.patches.numerics import MOST_MEMORY_AT

_DRAWN = 2**18
"""Number of random numbers that are drawn and then repeated, because drawing takes longer than writing."""


def chooses(value: torch.Tensor) -> bool:
    """Return whether a value may be an index, a mask or a count, which cannot be any number."""
    return not (value.is_floating_point() or value.is_complex())


def counts_from_one(node: fx.Node) -> bool:
    """Return whether a node's whole numbers are read by an operation that counts from one."""
    return any(u.target in COUNT_FROM_ONE for u in node.users)


def is_empty(node: fx.Node) -> bool:
    """Return whether nothing has been written to a node's value yet."""
    return getattr(node.target, "overloadpacket", None) in EMPTY


def made_up(like: torch.Tensor, kind: DKind, *, from_one: bool = False) -> torch.Tensor:
    """Return a tensor of the form of a (fake) one, with all of its storage.

    Gradients are small; other numbers lie between a quarter and three quarters, where logarithms, roots and
    probabilities are defined, and which are zero as whole numbers. Indices are zero, or one with `from_one`;
    masks are true.
    """
    count = like.untyped_storage().nbytes() // like.element_size()
    flat = torch.empty(count, dtype=like.dtype, device=like.device)
    if chooses(flat):
        flat.fill_(from_one or flat.dtype == torch.bool)
    elif flat.dtype.itemsize == 1:
        flat.zero_()                                # nothing draws numbers of eight bits
    else:
        drawn = flat[:_DRAWN]
        if kind == "grad":
            drawn.normal_(std=1e-2)
        else:
            (torch.view_as_real(drawn) if drawn.is_complex() else drawn).uniform_(0.25, 0.75)
        for start in range(_DRAWN, count, _DRAWN):
            flat[start:start + _DRAWN].copy_(drawn[:count - start])
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


class Layout(NamedTuple):
    """Properties of an operation's result that may differ from its trace."""

    dtype: torch.dtype
    strides: tuple[int, ...]


def layout_of(value: torch.Tensor) -> Layout:
    """Return the layout of an operation's result."""
    return Layout(value.dtype, value.stride())


def as_made(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a value in the layout of what was made: kernels choose by it, also along dimensions of size
    one."""
    value = value.to(layout.dtype)
    if value.stride() == layout.strides:
        return value
    found = torch.empty_strided(value.shape, layout.strides, dtype=value.dtype, device=value.device)
    return found.copy_(value)


def at_most_memory(node: fx.Node, value: Callable[[fx.Node], Any]) -> list[Callable[[], Any]]:
    """Return calls that need as much temporary memory as any, where that depends on values. `value`: of an
    operand."""
    target: Any = node.target
    if target not in MOST_MEMORY_AT:
        return []
    place, makers = MOST_MEMORY_AT[target]
    args: list[Any] = [*fx.node.map_arg(node.args, value)]
    return [functools.partial(target, *args[:place], make(args[place]), *args[place + 1:])
            for make in makers]
