"""Generated functions as the targets of nodes: the generated source defines and calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class OwnFunction(ABC):
    """Operations as one node with several results. Two of equal text are equal."""

    name: str
    """Name of the generated function, without its prefix and its number."""
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
    def function(self, name: str) -> str:
        """Return the generated function under another name."""

    @abstractmethod
    def namespaces(self) -> set[str]:
        """Return the namespaces of operators in the text."""

    @abstractmethod
    def values(self) -> tuple[torch.Tensor, ...]:
        """Return tensors like the results."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, OwnFunction) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)
