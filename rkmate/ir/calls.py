"""Calls as values, until they are printed: what they call and read is known without reading any text.

An argument is a value by its name, something that is held under a key, a constant, a list, or another call: a
view of a value is written where it is read. `Writer` makes Python of them.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, Union


@dataclass(frozen=True, slots=True)
class Name:
    """A value by its name in a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Held:
    """A value by its key in the environment of a step."""

    key: str
    how: Literal["stays", "ends", "source"] = "stays"
    """Whether the value stays in the environment, ends there, or belongs to the caller."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant by its Python: that of 1, of 1.0 and of True are three."""

    text: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its name, such as ``cuda:0``."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """The i-th of several results."""

    of: Argument
    index: int


@dataclass(frozen=True, slots=True)
class Operator:
    """A function of torch by its full name: ``torch.ops.aten.mm.default``, ``torch.addmm``."""

    path: str


_DEVICE = Operator("torch.device")


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the first argument."""

    name: str


class Defined(Protocol):
    """A function that the generated module defines, and then calls."""

    @property
    def name(self) -> str:
        """The name, without its prefix and its number."""
    @property
    def prefix(self) -> str: ...
    @property
    def imports(self) -> tuple[str, ...]:
        """Statements that its text needs before it."""

    def function(self, name: str, write: Writer) -> str:
        """Return the text of the function under a name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation."""

    target: Operator | Method | Defined
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()


Argument = Union[Name, Held, Constant, Device, Item, Call, "tuple[Argument, ...]"]


def leaves(argument: Argument) -> Iterator[Name | Held | Constant | Device]:
    """Yield what an argument is made of, in the order of its text."""
    if isinstance(argument, Call):
        for a in argument.args:
            yield from leaves(a)
        for _, a in argument.kwargs:
            yield from leaves(a)
    elif isinstance(argument, tuple):
        for a in argument:
            yield from leaves(a)
    elif isinstance(argument, Item):
        yield from leaves(argument.of)
    else:
        yield argument


def in_full(target: Operator | Defined) -> str:
    """Return the name of what is called in a text that stands alone: ``aten.mm.default``."""
    return target.path.removeprefix("torch.ops.") if isinstance(target, Operator) else target.name


@dataclass(frozen=True)
class Writer:
    """Writes arguments as Python."""

    callee: Callable[[Operator | Defined], str] = in_full
    """Names what is called."""
    device: Callable[[str], str] = str
    """Names a device, by its name."""

    def __call__(self, argument: Argument) -> str:
        """Return the Python of an argument."""
        if isinstance(argument, Name):
            return argument.name
        if isinstance(argument, Constant):
            return argument.text
        if isinstance(argument, Call):
            words = [*map(self, argument.args)]
            words += [f"{k}={self(a)}" for k, a in argument.kwargs]
            if isinstance(argument.target, Method):
                return f"{words[0]}.{argument.target.name}({', '.join(words[1:])})"
            return f"{self.callee(argument.target)}({', '.join(words)})"
        if isinstance(argument, tuple):
            return f"[{', '.join(map(self, argument))}]"
        if isinstance(argument, Item):
            return f"{self(argument.of)}[{argument.index}]"
        if isinstance(argument, Device):
            return f'{self.callee(_DEVICE)}("{self.device(argument.name)}")'
        return {"stays": f"env[{argument.key!r}]", "ends": f"env.pop({argument.key!r})",
                "source": f"env.source({argument.key!r})"}[argument.how]


# -- Names -----------------------------------------------------------------------------------------
#
# Names that are given once each.


class NameTable:
    """Names of values that are seen together: each is given once, and none is a reserved word."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def copied(self) -> NameTable:
        """Return a table that has given the same names, to go on from apart."""
        made = NameTable()
        made._reserved, made._taken, made._counts = self._reserved, {*self._taken}, {**self._counts}
        return made

    def fresh(self, base: str) -> str:
        """Return `base` for the first one of this name, then ``base_2``, ``base_3``; a reserved word gets an
        underscore."""
        if base in self._reserved:
            return self.fresh(f"{base}_")
        name, n = base, self._counts.get(base, 0)
        while not n or name in self._taken or name in self._reserved:
            n += 1
            name = base if n == 1 else f"{base}_{n}"
        self._counts[base] = n
        self._taken.add(name)
        return name


def letters(n: int) -> str:
    """Return the letters of number `n`, counted from 0: ``a`` to ``z``, then ``aa``, ``ab`` ..."""
    text = string.ascii_lowercase[n % 26]
    return letters(n // 26 - 1) + text if n >= 26 else text
