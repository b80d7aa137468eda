"""Hashable stand-ins for values that a captured step has baked in."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence, Set
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.torch_seam.containers import attributes_in

SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
           torch.memory_format)
"""Compared by value."""
FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType)


class Part:
    """A part of a key, with its hash: equal where the content is."""

    __slots__ = ("_hash", "content")

    def __init__(self, content: tuple[Any, ...] = ()) -> None:
        self.content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Part) and self._hash == other._hash
                                 and self.content == other.content)

    def or_new(self, content: tuple[Any, ...]) -> Part:
        """This part where it has that content, else a new one."""
        return self if self.content == content else Part(content)


class Same(Part):
    """Objects as a part of a key: equal to these objects alone.

    It refers to them: as long as a plan is kept under it, no other object gets their addresses.
    """

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[Any] = ()) -> None:
        super().__init__(tuple(map(id, objects)))
        self.objects = objects

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether it stands for these objects, in this order."""
        return identical(self.objects, objects)


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both are the very same objects, in one order."""
    return len(some) == len(others) and all(map(is_, some, others))


def by_value(value: Any) -> Any:
    """A scalar, or a tuple of them, by its value; a partial function by what it calls, and with what;
    anything else by being this very object."""
    if isinstance(value, SCALARS):
        return type(value), value
    if isinstance(value, tuple):
        return type(value), tuple(map(by_value, value))
    if isinstance(value, partial) and not vars(value):
        return (type(value), by_value(value.func), by_value(value.args),
                tuple((k, by_value(v)) for k, v in value.keywords.items()))
    if isinstance(value, MethodType):       # made anew whenever one asks for it
        return "method", Same((value.__func__, value.__self__))
    return "object", Same((value,))


def by_content(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """An argument by all that it holds: containers, arrays, and the attributes of objects.

    `above`: ids of what holds it, as it may hold itself. Raises `ArgumentError` for what can neither be taken
    apart nor be compared.
    """
    if isinstance(value, SCALARS):
        return type(value), value
    if id(value) in above:
        return "itself"
    if isinstance(value, (*FUNCTIONS, nn.Module, torch.Tensor)):
        return by_value(value)
    above = above | {id(value)}
    content, state = _members(value, above), attributes_in(value)
    if content is None and (not state or _says_what_it_equals(value)):
        try:
            hash(value)
            return type(value), value
        except TypeError:
            if not state and not isinstance(getattr(value, "__dict__", None), dict):
                raise ArgumentError(
                    f"an argument holds a {type(value).__name__}, of which cannot be told whether it is as "
                    "when the call was planned: give tensors, numbers, containers or objects with "
                    "attributes") from None
    return type(value), content, tuple((k, by_content(v, above)) for k, v in sorted(state.items()))


def _members(value: Any, above: frozenset[int]) -> Any:
    """What is in a container or an array; None for what is neither."""
    if isinstance(value, (list, tuple, deque)):
        return tuple(by_content(v, above) for v in value)
    if isinstance(value, Mapping):
        return tuple((by_content(k, above), by_content(v, above)) for k, v in value.items())
    if isinstance(value, Set):
        return frozenset(by_content(v, above) for v in value)
    if isinstance(value, slice):                # has no hash before Python 3.12
        return tuple(by_content(v, above) for v in (value.start, value.stop, value.step))
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":      # dates have no memory of their own
        return str(value.dtype), by_content(value.view("i8"), above)
    try:
        array = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return None if "O" in array.format else (         # addresses of objects
        array.format, array.shape, array.strides, hashlib.sha256(array.tobytes()).digest())


def _says_what_it_equals(value: Any) -> bool:
    """Whether its class has a hash, and all attributes in slots: some may be caches (of a path)."""
    own: Any = type(value).__hash__
    return not hasattr(value, "__dict__") and own is not object.__hash__
