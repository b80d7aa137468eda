"""Functions of our own as the targets of nodes: what the generated source defines, and then calls."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from rkmate.ir.calls import Writer


class OwnFunction(ABC):
    """Operations as one node with several results. Two of equal text are equal."""

    name: str
    """What the generated function is called, but for its prefix and a number."""
    prefix: str
    imports: tuple[str, ...] = ()
    """Statements that its text needs before it."""

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def _opname(self) -> str:
        return self.name

    @property
    def text(self) -> str:
        """The generated function under its own name; equal for equal computations."""
        raise NotImplementedError

    @abstractmethod
    def function(self, name: str, write: Writer = Writer()) -> str:
        """Return the generated function under another name. `write`: what its operations are written with."""

    @abstractmethod
    def values(self) -> tuple[torch.Tensor, ...]:
        """Tensors like the results."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, OwnFunction) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)
