"""A storage that the runtime tracks."""

from __future__ import annotations

import weakref

import torch

from rkmate.dtr.node import Node
from rkmate.dtr.runtime.operation import Operation


class Buffer(Node):
    """One version of the contents of a storage.

    The program's tensors keep their storage object for ever; evicting it empties that object, and
    rematerializing fills it again, so that views, tensors saved by autograd and the program's own
    names all stay valid. An in-place operation makes a new version, which takes the storage over.
    """

    __slots__ = ("operation", "place", "program", "private", "guard", "counted", "name", "device")

    def __init__(self, index: int, size: int, device: torch.device) -> None:
        super().__init__(index, size)
        self.operation: Operation | None = None
        """What computes it; None when nothing can."""
        self.place = 0
        """Position in the operation's ``outputs``."""
        self.program: weakref.ref[torch.UntypedStorage] | None = None
        """The program's storage; None when the program dropped it or wrote over it."""
        self.private: torch.UntypedStorage | None = None
        """The runtime's own copy of what the program no longer holds."""
        self.guard: torch.UntypedStorage | None = None
        """The program's storage, while nothing can compute it and something not in memory is made
        from it: what the program lets go of then stays until it is not needed."""
        self.counted = True
        """Its bytes count against the budget; a parameter's gradient's do not."""
        self.name = ""
        """Its name in the log."""
        self.device = device

    def storage(self) -> torch.UntypedStorage | None:
        """Where the contents are, or will be; None for an evicted one that the program dropped."""
        if self.program is not None:
            return self.program()
        return self.private

    @property
    def in_memory(self) -> bool:
        """Whether the contents are there; a dropped buffer may be marked as resident for a while."""
        return self.resident and self.storage() is not None

    def watch(self) -> None:
        """Set or lift the guard, as the children stand, once nothing can compute this buffer."""
        if self.operation is None:
            needed = any(not child.in_memory for child in self.made())
            self.guard = self.program() if needed and self.program is not None else None

    def made(self) -> list[Buffer]:
        """The children."""
        return [child for child in self.children if isinstance(child, Buffer)]
