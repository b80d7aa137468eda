"""The traits of an operation, from its schema, and the arguments of one call, read in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rkmate.dtr.runtime.buffer import Buffer, Place
from rkmate.torch_seam.schema import OpOverload, schema_of
from rkmate.torch_seam.tensors import storage_id

# -- Traits ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Traits:
    """Traits of an operation, from its schema."""

    mutated: tuple[tuple[int, str], ...]
    """Arguments that the operation writes to, by position and name."""
    view: bool
    """Whether results share the storages of arguments."""
    random: bool
    """Whether the operation draws from a generator."""
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
    """Return the traits of ``operation``, read from its schema once."""
    schema = schema_of(operation)
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
    """Return the overload with the same inputs and one ``out`` argument, where it saves a copy.

    Generated variants compute a fresh result and copy it, which saves nothing.
    """
    wanted = [(argument.name, str(argument.type)) for argument in schema_of(operation).arguments]
    for overload in operation.overloadpacket.overloads():
        variant = getattr(operation.overloadpacket, overload)
        arguments = schema_of(variant).arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        inputs = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == 1 and inputs == wanted and torch.Tag.generated not in variant.tags:
            return variant, outs[0]
    return None, ""


def without_statistics(operation: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments for a repetition of a batch norm. The results of a training run do not read the
    running statistics, and a repetition must not update them a second time."""
    mean, variance, training = _STATISTICS[schema_of(operation).name]
    if not args[training]:
        return args
    changed = list(args)
    changed[mean] = changed[variance] = None
    return tuple(changed)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with ``change`` applied to its tensors; lists and tuples are entered."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    return value


# -- Arguments -------------------------------------------------------------------------------------

class Arguments:
    """Data that the runtime needs about the arguments of one call."""

    __slots__ = ("args", "kwargs", "inputs", "constants", "key", "_live")

    def __init__(
        self, live: dict[int, Buffer], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.inputs: dict[Buffer, None] = {}
        """Tracked buffers, each once, in order."""
        self.constants: dict[int, torch.Tensor] = {}
        """Tensors on untracked storages, by the storage's address."""
        self.key: list[Any] = []
        """Shapes, strides, types, devices and plain values: what an operation's memory depends on."""
        self._live = live
        self.args = tuple([self._read(value) for value in args])
        """The arguments with places for tensors."""
        self.kwargs = {}
        if kwargs:
            for name, value in kwargs.items():
                self.key.append(name)
                self.kwargs[name] = self._read(value)

    def _read(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            address = storage_id(storage)
            buffer = self._live.get(address)
            if buffer is None:
                self.constants[address] = value
                place = Place(storage, value)
            else:
                self.inputs[buffer] = None
                place = Place(buffer, value)
            self.key.append((place.shape, value.device))
            return place
        if isinstance(value, (list, tuple)):
            self.key.append(len(value))
            return type(value)([self._read(item) for item in value])
        if value is None or isinstance(value, (int, float, str)):
            self.key.append((type(value), value))
        else:
            self.key.append(str(value))
        return value
