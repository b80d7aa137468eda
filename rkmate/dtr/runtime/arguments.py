"""The arguments of one call, read in one pass."""

from __future__ import annotations

from typing import Any

import torch

from rkmate.dtr.runtime.buffer import Buffer, Place
from rkmate.torch_seam.tensors import storage_id


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
