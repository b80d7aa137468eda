"""Hints inside of a forward: `rkmate.keep(x)` and `rkmate.recompute(x)`.

Outside of a capture, they return what they get. In a capture, they return an alias that carries the wish; the
pass "hints" hands the wish to the value and takes the alias off.
"""

from __future__ import annotations

import itertools
import traceback
from typing import Literal, NamedTuple

import torch
from torch import fx

from rkmate.errors import ArgumentError
from rkmate.torch_seam.nodes import is_backward, wish_marked, wish_of

Wish = Literal["keep", "recompute"]

_numbers = itertools.count()


def keep(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, and let a plan keep it: it is never computed again in the backward.

    Call it inside of a model's forward: ``x = rkmate.keep(self.attention(x))``. Without a plan, nothing
    happens.

    Raises:
        ArgumentError: `x` is no tensor.
        WishError: when the model is planned, `recompute` wants the opposite for the value, or the planned
            graph does not have it.
    """
    return _hinted(x, "keep")


def recompute(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, and let a plan compute it again: it is never kept from the forward to the backward.

    Call it inside of a model's forward: ``x = rkmate.recompute(gelu(x))``. Without a plan, nothing happens.

    Raises:
        ArgumentError: `x` is no tensor.
        WishError: when the model is planned, `keep` wants the opposite for the value, or it is an input or an
            output of the model.
    """
    return _hinted(x, "recompute")


def _hinted(x: torch.Tensor, wish: Wish) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"rkmate.{wish} takes a tensor, and got {type(x).__name__}")
    if not torch.compiler.is_exporting():
        return x
    caller = traceback.extract_stack(limit=3)[0]
    with wish_marked((next(_numbers), wish, f"{caller.filename}:{caller.lineno}")):
        marked: torch.Tensor = torch.ops.aten.alias.default(x)
    return marked


def renewed(mark: tuple[int, str, str]) -> tuple[int, str, str]:
    """Return the mark of the same hint in another layer."""
    return next(_numbers), *mark[1:]


class Hint(NamedTuple):
    """A hint in a graph."""

    node: fx.Node
    """The alias in a captured graph; the value itself in a simplified one."""
    wish: Wish
    place: str
    """File and line."""


def hints_in(graph: fx.Graph) -> dict[int, Hint]:
    """Return the hints of a graph, by number."""
    found: dict[int, Hint] = {}
    for node in graph.nodes:
        marked = wish_of(node)
        if marked is not None and not is_backward(node):
            number, wish, place = marked
            found[number] = Hint(node, wish, place)
    return found
