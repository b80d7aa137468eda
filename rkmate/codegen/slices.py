"""A generated step as values, between its schedule and its text. No torch.

A slice is a stretch of one block's steps: one function, of values with names of their own. What it
shares with others is in the environment, under keys: a call says which.
"""

from __future__ import annotations

import ast
import functools
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rkmate.errors import GraphError

RESERVED = frozenset({*keyword.kwlist, "_", "env", "torch", "take", "read", "give", "sources", "rng",
                      "float"})
"""What a value cannot be called, beside the namespaces of operators: the words of the printed text."""

CopyWord = Literal["copy_out", "leave", "copy_in", "arrive"]
"""Of a copy: begin it, wait for its end and free the value; make room and begin the copy back, wait for its
end."""
Draws = Literal["", "draw", "remember", "replay"]
"""Of random numbers: none, once, the first time of several, again."""


@dataclass(frozen=True)
class Run:
    """Call one operation."""

    call: str
    """Python of the call; it reads `reads`, and namespaces of operators."""
    reads: tuple[str, ...]
    makes: tuple[str | None, ...]
    """Per result of the operation, the value that it becomes; None for what goes at once."""
    several: bool = False
    """Whether the operation returns a tuple of results."""
    over: str | None = None
    """The value whose storage the result takes."""
    again: float | None = None
    """Of a computation that ran before: its seconds."""
    draws: Draws = ""
    adds: bool = False
    """Whether it adds to a gradient that the caller holds, where another thread may add, too."""
    state: int | None = None
    """Which of the slice's generator states a repeated draw stores or restores."""


@dataclass(frozen=True)
class Look:
    """A name for a view that several statements read."""

    name: str
    call: str
    """Python of the view; it reads `reads`, and namespaces of operators."""
    reads: tuple[str, ...]
    of: str
    """The value that it looks at: the name ends with it."""


@dataclass(frozen=True)
class Free:
    """Values end here."""

    values: tuple[str, ...]
    bytes: int
    """How much memory that frees: nothing of a value that was overwritten."""
    views: tuple[str, ...] = ()
    """Names of views that end with them."""


@dataclass(frozen=True)
class Slice:
    """One function over named values."""

    label: str
    """What it is called, but for a number."""
    take: tuple[str, ...]
    """Values out of the environment that end here."""
    read: tuple[str, ...]
    """Values of the environment that stay there."""
    sources: tuple[str, ...]
    """Values that the caller holds."""
    body: tuple[Run | Look | Free, ...]
    give: tuple[str, ...]
    """Values for the environment."""
    states: int = 0
    """How many generator states it stores or restores."""

    def verify(self, namespaces: Iterable[str]) -> Slice:
        """Check that each value is there when it is read and ends once; returns the slice itself.

        Raises `GraphError`.
        """
        known = {*namespaces, *RESERVED}
        entering = (*self.take, *self.read, *self.sources)
        own = {*self.take}                     # what may end here
        there = set(entering)
        if len(there) < len(entering):
            raise GraphError(f"{self.label}: two values that enter have one name")
        states: list[int] = []
        over: str | None = None
        views: dict[str, str] = {}
        for step in self.body:
            if over is not None and not (isinstance(step, Free) and over in step.values):
                raise GraphError(f"{self.label}: {over} was overwritten, and does not end")
            over = None
            if isinstance(step, Free):
                if not step.values or not own.issuperset(step.values):
                    raise GraphError(f"{self.label}: ends {', '.join(step.values)}, which is not its own")
                own.difference_update(step.values)
                there.difference_update((*step.values, *step.views))
                if {v for v, of in views.items() if of in step.values} != {*step.views}:
                    raise GraphError(f"{self.label}: {', '.join(step.values)} ends without its views")
                for v in step.views:
                    del views[v]
                continue
            used = _names_in(step.call)
            if used - known != set(step.reads) - known or not there.issuperset(step.reads):
                raise GraphError(f"{self.label}: {step.call} does not read what is there")
            if isinstance(step, Look):
                if step.name in there or step.name in known or step.of not in there:
                    raise GraphError(f"{self.label}: {step.call} cannot be called {step.name}")
                there.add(step.name)
                views[step.name] = step.of
                continue
            if len(step.makes) != 1 and not step.several:
                raise GraphError(f"{self.label}: {step.call} makes one value")
            if (step.state is not None) != (step.draws in ("remember", "replay")):
                raise GraphError(f"{self.label}: {step.call} repeats its draws without a state")
            states += [step.state] if step.state is not None else []
            if step.over is not None and step.over not in (*step.reads, *(views.get(r) for r in step.reads)):
                raise GraphError(f"{self.label}: {step.call} overwrites {step.over}, which it does not read")
            over = step.over
            for name in step.makes:
                if name is None:
                    continue
                if name in there or name in known or not name.isidentifier():
                    raise GraphError(f"{self.label}: {step.call} makes a second {name}")
                there.add(name)
                own.add(name)
        if over is not None or own != set(self.give) or len(self.give) > len(own):
            raise GraphError(f"{self.label}: gives {', '.join(self.give)}, has {', '.join(sorted(own))}")
        if states != list(range(self.states)) or known & set(entering):
            raise GraphError(f"{self.label}: generator states or names are not its own")
        return self


_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def _names_in(call: str) -> frozenset[str]:
    """The names of an expression. Blocks, and plans of other sizes, have the same calls but for numbers."""
    return _parsed(_NUMBER.sub("0", call))


@functools.lru_cache(maxsize=1 << 13)
def _parsed(call: str) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(ast.parse(call, mode="eval")) if isinstance(n, ast.Name))


@dataclass(frozen=True)
class Call:
    """A slice run on the environment: the keys of what its values are."""

    slice: Slice
    take: tuple[str, ...]
    read: tuple[str, ...]
    sources: tuple[str, ...]
    give: tuple[str, ...]
    rng: tuple[str, ...]
    """Names of the random computations that run several times."""


@dataclass(frozen=True)
class Drop:
    """Values of the environment that end without having been read here."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """A value of the environment goes away, or comes back."""

    word: CopyWord
    key: str


@dataclass(frozen=True)
class Write:
    """Write back what the forward overwrites."""

    key: str
    value: str
    """Its new value: Python over the environment."""


@dataclass(frozen=True)
class Function:
    """The forward, or one segment of the backward."""

    name: str
    comment: str
    body: tuple[Call | Drop | Copy | Write, ...]
    returns: tuple[str, ...]
    """Python over the environment."""
    pops: tuple[str, ...] = ()
    """Keys of what `returns` takes out of the environment."""


@dataclass(frozen=True)
class Listing:
    """All functions of a step: the forward first, then the backward's segments in order."""

    summary: str
    namespaces: Mapping[str, str]
    """Namespaces of operators, by the name that the text gives them."""
    functions: tuple[Function, ...]
    arriving: tuple[str, ...]
    """Keys of the outputs' gradients, which are there when the backward starts."""
    tiled: Mapping[str, str] = field(default_factory=dict)
    """Functions that run a few rows at a time, or that are compiled: names, and their text."""
    imports: tuple[str, ...] = ()
    """Statements that these need before them."""

    def verify(self) -> Listing:
        """Check every slice, and that the environment has what is taken and read; returns the listing
        itself. Raises `GraphError`."""
        there: set[str] = set()
        away: dict[str, CopyWord] = {}
        for number, function in enumerate(self.functions):
            if number == 1:
                there.update(self.arriving)
            for call in function.body:
                if isinstance(call, Call):
                    call.slice.verify((*self.namespaces, *self.tiled))
                    _enter(there, call, function.name)
                elif isinstance(call, Drop):
                    _end(there, call.keys, function.name)
                elif isinstance(call, Copy):
                    _copy(there, away, call, function.name)
            _end(there, function.pops, function.name)
        return self


def _enter(there: set[str], call: Call, where: str) -> None:
    part = call.slice
    if any(len(a) != len(b) for a, b in ((part.take, call.take), (part.read, call.read),
                                         (part.sources, call.sources), (part.give, call.give))) \
            or part.states != len(call.rng):
        raise GraphError(f"{where}: calls {part.label} with other values than it has")
    missing = set(call.read) - there
    if missing:
        raise GraphError(f"{where}: {part.label} reads {', '.join(sorted(missing))}, which is not there")
    _end(there, call.take, where)
    there.update(call.give)


def _copy(there: set[str], away: dict[str, CopyWord], copy: Copy, where: str) -> None:
    """`away`: of each key that was copied, what was last done with it."""
    after: dict[CopyWord, tuple[CopyWord, ...]] = {
        "copy_out": (), "leave": ("copy_out",), "copy_in": ("leave", "arrive"), "arrive": ("copy_in",)}
    last = away.get(copy.key)
    if (last is None) != (not after[copy.word]) or (last is not None and last not in after[copy.word]) \
            or (copy.key in there) != (copy.word != "copy_in"):
        raise GraphError(f"{where}: {copy.word} of {copy.key}, out of turn")
    away[copy.key] = copy.word
    if copy.word == "leave":
        there.discard(copy.key)
    elif copy.word == "copy_in":
        there.add(copy.key)


def _end(there: set[str], keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key not in there:
            raise GraphError(f"{where}: {key} ends, which is not there")
        there.discard(key)
