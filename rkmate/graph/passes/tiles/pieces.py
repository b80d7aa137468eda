"""Parts of values, and operations on parts: what the rules of operators are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx


@dataclass(frozen=True)
class Band:
    """A part of a value: a range of one dimension."""

    dim: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def around(self, other: Band) -> Band:
        """Return the smallest range that holds both. Raises `ValueError` for another dimension."""
        if other.dim != self.dim:
            raise ValueError(f"{self} and {other} are ranges of different dimensions")
        return Band(self.dim, min(self.start, other.start), max(self.stop, other.stop))


Need = tuple[fx.Node, Band | None]
"""An operand, and the part of it that is needed; None: the whole."""


class Write(Protocol):
    """Writes the operations of one tile."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation."""

    def get(self, need: Need) -> Any:
        """Return an operand's part in this tile."""

    def statistics(self, norm: fx.Node) -> tuple[Any, Any] | None:
        """Return mean and variance of what a norm reads; None while tiles compute them."""


@dataclass(frozen=True)
class Piece:
    """An operation, for a part of its result."""

    needs: tuple[Need, ...]
    write: Callable[[Write], Any]
    """Function that writes the piece, and returns its value."""
    mixes: bool = False
    """Whether the piece reads statistics of the whole operand, which tiles have computed before."""


CutRule = Callable[[fx.Node, Band], Piece | None]


def same(node: fx.Node, needs: Sequence[Need], *, args: Sequence[Any] | None = None) -> Piece:
    """Return the operation itself, on parts of some operands, and with other arguments."""
    parts = dict(needs)
    mine: Any = tuple(node.args) if args is None else tuple(args)

    def write(tile: Write) -> fx.Node:
        given, kwargs = fx.node.map_arg((mine, node.kwargs), lambda n: tile.get((n, parts.get(n))))
        return tile.call(node.target, *given, **kwargs)

    others = [n for n in node.all_input_nodes if n not in parts]
    return Piece((*needs, *((n, None) for n in others)), write)
