"""State of a forward that is neither a tensor, nor an attribute, nor a member of its lists and dictionaries:
generators of random numbers, sets, arrays, and what lies deeper inside of the objects that modules hold.

No plan repeats changes of it. A forward that changes it in each call is refused; what only a first call
changes (a set of the shapes that were seen) does not matter.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rkmate.graph.capture.forward_code import NUMBERS
from rkmate.torch_seam.containers import PLAIN

LARGE = 1000
"""Members from which on nothing is looked for inside of a list, dictionary or object."""
_LARGE_ARRAY = 1 << 20
"""Bytes from which on an array is not looked at."""
_DEPTH = 3
_MOST = 5000
"""Values of one model that are looked at."""
NOTED = (list, dict, OrderedDict, defaultdict, deque, Counter)
"""Types of lists and dictionaries whose members `PythonState` looks at, where an attribute leads to them."""
_CONTAINERS: tuple[Any, ...] = (set, bytearray, list, dict, deque)
"""Classes made of these may copy otherwise, or not at all: they are read and written as these are."""
OTHERS = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
"""Types of what has a state of its own that others look at, or none."""


def _of_numpy(value: Any, name: str) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not type(value).__module__.startswith("numpy"):
        return False
    return isinstance(value, numpy.ndarray if name == "ndarray" else getattr(numpy.random, name))


def _is_small_array(value: Any) -> bool:
    return _of_numpy(value, "ndarray") and value.nbytes <= _LARGE_ARRAY and not value.dtype.hasobject


def is_generator(value: Any) -> bool:
    """Return whether a value draws random numbers, other than torch's generators."""
    return isinstance(value, random.Random) or any(
        _of_numpy(value, name) for name in ("Generator", "RandomState"))


def is_leaf(value: Any) -> bool:
    """Return whether a value has a state, and is no list, dictionary, or object with attributes."""
    return is_generator(value) or _is_small_array(value) or (
        isinstance(value, (set, bytearray)) and len(value) <= LARGE)


def _slots_of(value: Any) -> list[str]:
    slots = [vars(c).get("__slots__", ()) for c in type(value).__mro__]
    names = [k for names in slots for k in ((names,) if isinstance(names, str) else names)]
    return [k for k in names if k not in ("__dict__", "__weakref__") and hasattr(value, k)]


def _read(held: Any) -> Any:
    """Return a copy of the state."""
    if isinstance(held, random.Random):
        return held.getstate()
    if _of_numpy(held, "Generator"):
        return held.bit_generator.state
    if _of_numpy(held, "RandomState"):
        return held.get_state(legacy=False)
    for kind in _CONTAINERS:
        if isinstance(held, kind):
            return kind(held)
    if _of_numpy(held, "ndarray"):
        return held.copy()
    return {**getattr(held, "__dict__", {}), **{k: getattr(held, k) for k in _slots_of(held)}}


def write(held: Any, state: Any) -> None:
    """Give something its state, or its members, from before."""
    if isinstance(held, random.Random):
        held.setstate(state)
    elif _of_numpy(held, "Generator"):
        held.bit_generator.state = state
    elif _of_numpy(held, "RandomState"):
        held.set_state(state)
    elif isinstance(held, set):
        held.clear()
        held.update(state)
    elif isinstance(held, dict):
        base = OrderedDict if isinstance(held, OrderedDict) else dict
        base.clear(held)
        base.update(held, state)
    elif isinstance(held, (bytearray, list)) or _of_numpy(held, "ndarray"):
        held[:] = state
    elif isinstance(held, deque):
        held.clear()
        held.extend(state)
    else:
        slots = _slots_of(held)
        for k in [k for k in getattr(held, "__dict__", {}) if k not in state]:
            del held.__dict__[k]
        for k, v in state.items():
            if k in slots:
                setattr(held, k, v)
            else:
                held.__dict__[k] = v


def _equal(one: Any, other: Any, *, tensors: bool = False) -> bool:
    """Return whether two states are equal. `tensors`: compare tensors by their numbers, not by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k], tensors=tensors)
                                                  for k, v in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(_equal(a, b, tensors=tensors)
                                              for a, b in zip(one, other, strict=True))
    if tensors and type(one) is torch.Tensor:
        return one.dtype == other.dtype and torch.equal(one, other)
    if _of_numpy(one, "ndarray"):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    return isinstance(one, (*PLAIN, set, bytearray)) and bool(one == other)


@dataclass(frozen=True)
class Hidden:
    """Something with a state, at one moment."""

    path: str
    held: Any
    old: Any

    def has_changed(self) -> bool:
        """Return whether the object has another state now."""
        return not _equal(_read(self.held), self.old)

    def now(self) -> Hidden:
        """Return a record of the object with its current state."""
        return Hidden(self.path, self.held, _read(self.held))

    def restore(self) -> None:
        """Restore the recorded state of the object."""
        write(self.held, self.old)

    def set_back(self) -> None:
        """Give the object the state from before the recorded one, if what has changed since then had changed
        in the same way before: a list with a further member, a number that has grown."""
        now, old = _read(self.held), self.old
        if isinstance(now, (list, deque)):
            before, more = [*now][:len(old)], [*now][len(old):]
            if more and _equal(before, [*old]) and _equal(before[-len(more):], more, tensors=True):
                old = before[:-len(more)]
        elif isinstance(now, dict):
            old = {k: v - (now[k] - v) if type(v) in NUMBERS and type(now.get(k)) in NUMBERS else v
                   for k, v in old.items()}
        write(self.held, old)

    def __str__(self) -> str:
        kind = type(self.held).__name__
        return f"the random generator {self.path}" if is_generator(self.held) else f"the {kind} {self.path}"


def hidden_in(path: str, value: Any, seen: set[int], *, inside: bool,
              depth: int = _DEPTH) -> Iterator[Hidden]:
    """Yield what has a state in a value. `inside`: whether nobody else looks at the members of lists and
    dictionaries, as in an object. `seen`: the identities of what was looked at."""
    if isinstance(value, (*PLAIN, *OTHERS)) or id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if is_leaf(value):
        yield Hidden(path, value, _read(value))
    elif not depth:
        return
    elif isinstance(value, (list, tuple, dict, deque)):
        if len(value) <= LARGE:
            inside |= type(value) not in NOTED and getattr(value, "__dict__", None) is not value
            if inside and not isinstance(value, tuple):
                yield Hidden(path, value, _read(value))
            for k, v in list(value.items()) if isinstance(value, dict) else enumerate(value):
                yield from hidden_in(f"{path}[{k!r}]", v, seen, inside=inside, depth=depth - 1)
    elif isinstance(getattr(value, "__dict__", None), dict) or _slots_of(value):
        content = _read(value)
        if len(content) > LARGE or any(isinstance(v, nn.Module) for v in content.values()):
            return                      # a trainer, or what belongs to it
        yield Hidden(path, value, content)
        for k, v in content.items():
            yield from hidden_in(f"{path}.{k}", v, seen, inside=True, depth=depth - 1)
