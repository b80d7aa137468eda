"""A storage that the runtime tracks, and the operation that computes it: each names the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from rkmate.dtr.pool import Node
from rkmate.torch_seam.schema import OpOverload


class Buffer(Node):
    """A version of the contents of a storage.

    The program's tensors keep their storage object for ever; evicting it empties that object, and
    rematerializing fills it again, so that views, tensors saved by autograd and the program's own
    names all stay valid. An in-place operation makes a new version, which takes the storage over.
    """

    __slots__ = ("operation", "program", "private", "guard", "counted", "name", "device")

    def __init__(self, index: int, size: int, device: torch.device) -> None:
        super().__init__(index, size)
        self.operation: Operation | None = None
        """The operation that computes the buffer; None if nothing can."""
        self.program: weakref.ref[torch.UntypedStorage] | None = None
        """The program's storage; None when the program dropped it or wrote over it."""
        self.private: torch.UntypedStorage | None = None
        """The runtime's own copy of what the program no longer holds."""
        self.guard: torch.UntypedStorage | None = None
        """The program's storage, while nothing can compute it and something not in memory is made
        from it: what the program lets go of then stays until it is not needed."""
        self.counted = True
        """Whether the buffer's bytes count against the budget; those of a parameter's gradient do not."""
        self.name = ""
        """Name in the log."""
        self.device = device

    def storage(self) -> torch.UntypedStorage | None:
        """The storage of the contents, now or later; None for an evicted buffer that the program dropped."""
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
        """Return the children."""
        return [child for child in self.children if isinstance(child, Buffer)]


class Place:
    """A tensor's geometry on a storage: what a view is, apart from the storage itself."""

    __slots__ = ("owner", "shape", "offset")

    def __init__(self, owner: Buffer | torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self.owner = owner
        """A tracked buffer, or the storage of a constant."""
        self.shape = (tensor.shape, tensor.stride(), tensor.dtype)
        self.offset = tensor.storage_offset()

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this geometry on ``storage``, outside autograd."""
        size, stride, dtype = self.shape
        blank = torch.empty(0, dtype=dtype, device=storage.device)
        return blank.set_(storage, self.offset, size, stride)


class Operation:
    """A call, kept so that it can run again: its function, its arguments as places, and its results."""

    __slots__ = (
        "function",
        "args",
        "kwargs",
        "inputs",
        "constants",
        "outputs",
        "written",
        "random_state",
        "cost",
        "extra_bytes",
        "hoped_bytes",
        "alive",
        "gradients",
    )

    def __init__(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.inputs: list[Buffer] = []
        """Tracked buffers among the arguments, each once."""
        self.constants: list[int] = []
        """Addresses of the untracked storages among the arguments."""
        self.outputs: list[tuple[int, Place]] = []
        """Position among the results, and geometry, of each result with a buffer of its own."""
        self.written: list[tuple[Buffer, Buffer]] = []
        """For each argument written in place: the buffer before and the buffer after."""
        self.random_state: bytes | None = None
        """The generator's state before the call."""
        self.cost = 0
        """Nanoseconds of the first call."""
        self.extra_bytes = 0
        """Temporary memory beyond inputs and outputs, as measured."""
        self.hoped_bytes = 0
        """Temporary memory beyond inputs and outputs, if it could only be estimated."""
        self.gradients = torch.is_grad_enabled()
        """The program's gradient mode, which some kernels read."""
        self.alive = 0
        """Number of its result buffers that are still in the graph."""

    @property
    def name(self) -> str:
        """The function's name, such as ``aten.mm.default``."""
        return str(self.function)


def map_places(value: Any, change: Callable[[Place], torch.Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to its places; lists and tuples are entered."""
    if isinstance(value, Place):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_places(item, change) for item in value])
    return value
