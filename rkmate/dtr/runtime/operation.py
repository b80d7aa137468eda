"""An operation that ran, kept so that it can run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

if TYPE_CHECKING:
    from rkmate.dtr.runtime.buffer import Buffer


class Place:
    """A tensor's geometry on a storage: what a view is, apart from the storage itself."""

    __slots__ = ("owner", "shape", "offset")

    def __init__(self, owner: Buffer | torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self.owner = owner
        """A tracked buffer, or the storage of a constant."""
        self.shape = (tensor.shape, tensor.stride(), tensor.dtype)
        self.offset = tensor.storage_offset()

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry on ``storage``, outside autograd."""
        size, stride, dtype = self.shape
        blank = torch.empty(0, dtype=dtype, device=storage.device)
        return blank.set_(storage, self.offset, size, stride)


@dataclass(frozen=True)
class Traits:
    """What an operation's schema says about it."""

    mutated: tuple[tuple[int, str], ...]
    """Arguments that it writes to, by position and name."""
    view: bool
    """Its results look at its arguments' storages."""
    random: bool
    """It draws from a generator."""
    keeps_statistics: bool
    """A batch norm that updates running statistics its schema does not mention."""
    into: OpOverload | None
    """The variant that writes its one result into a tensor that it is given."""
    into_name: str


_STATISTICS = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
}


@cache
def traits_of(operation: OpOverload) -> Traits:
    """The traits of ``operation``, read from its schema once."""
    schema = operation._schema
    mutated = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    into, name = None, ""
    if not mutated and len(schema.returns) == 1 and schema.returns[0].alias_info is None:
        into, name = _variant_into(operation)
    return Traits(
        mutated=mutated,
        view=not mutated and any(r.alias_info is not None for r in schema.returns),
        random=torch.Tag.nondeterministic_seeded in operation.tags,
        keeps_statistics=schema.name in _STATISTICS,
        into=into,
        into_name=name,
    )


def _variant_into(operation: OpOverload) -> tuple[OpOverload | None, str]:
    """The overload with the same inputs and one ``out`` argument, where it saves a copy.

    Generated variants compute a fresh result and copy it, which saves nothing.
    """
    wanted = [(argument.name, str(argument.type)) for argument in operation._schema.arguments]
    for overload in operation.overloadpacket.overloads():
        variant = getattr(operation.overloadpacket, overload)
        arguments = variant._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        inputs = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == 1 and inputs == wanted and torch.Tag.generated not in variant.tags:
            return variant, outs[0]
    return None, ""


def without_statistics(operation: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for a repetition of a batch norm: a training run's results do not read the
    running statistics, and a repetition must not update them a second time."""
    mean, variance, training = _STATISTICS[operation._schema.name]
    if not args[training]:
        return args
    changed = list(args)
    changed[mean] = changed[variance] = None
    return tuple(changed)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with ``change`` applied to its tensors; lists and tuples are entered."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    return value


def map_places(value: Any, change: Callable[[Place], torch.Tensor]) -> Any:
    """``value`` with ``change`` applied to its places; lists and tuples are entered."""
    if isinstance(value, Place):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_places(item, change) for item in value])
    return value


class Operation:
    """One call: its function, its arguments as places, and what it made."""

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
        """Per argument written in place: the buffer before and the buffer after."""
        self.random_state: bytes | None = None
        """The generator's state before the call."""
        self.cost = 0
        """Nanoseconds of the first call."""
        self.extra_bytes = 0
        """Temporary memory beyond inputs and outputs, as measured."""
        self.hoped_bytes = 0
        """The same where it could only be estimated."""
        self.gradients = torch.is_grad_enabled()
        """The program's gradient mode, which some kernels read."""
        self.alive = 0
        """How many of the buffers that it made are still in the graph."""

    @property
    def name(self) -> str:
        """The function's name, such as ``aten.mm.default``."""
        return str(self.function)
