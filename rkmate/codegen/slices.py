"""A generated step as values, between its schedule and its text. No torch.

A slice is a stretch of one block's steps: one function, of values with names of their own. What it
shares with others is in the environment, under keys: a call says which.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rkmate.errors import GraphError
from rkmate.ir.calls import Argument, Call, Held, Item, Name, leaves

RESERVED = frozenset({*keyword.kwlist, "_", "env", "torch", "take", "read", "give", "sources", "rng",
                      "float"})
"""Names that a value cannot have: the words of the printed text."""

CopyWord = Literal["copy_out", "leave", "copy_in", "arrive"]
"""Step of a copy: begin it; wait for its end and free the value; make room and begin the copy back; wait for
its end."""
Draws = Literal["", "draw", "remember", "replay"]
"""Use of random numbers: none, once, the first time of several, again."""


@dataclass(frozen=True)
class Run:
    """A call of one operation."""

    call: Call
    makes: tuple[str | None, ...]
    """Per result of the operation, the value that it becomes; None for what goes at once."""
    several: bool = False
    """Whether the operation returns a tuple of results."""
    over: str | None = None
    """The value whose storage the result takes."""
    again: float | None = None
    """Seconds of a computation that ran before; None for a first run."""
    draws: Draws = ""
    adds: bool = False
    """Whether the call adds to a gradient that the caller holds, where another thread may add, too."""
    state: int | None = None
    """Number of the slice's generator state that a repeated draw stores or restores."""


@dataclass(frozen=True)
class Look:
    """A name for a view that several statements read."""

    name: str
    call: Call | Item
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
    """A function over named values."""

    label: str
    """Name of the function, without its number."""
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

    def __hash__(self) -> int:
        return hash((self.label, self.take, self.read, self.sources, self.give))        # the body is long

    def names(self) -> Iterator[str]:
        """Yield all names that it gives to values, some several times."""
        yield from (*self.take, *self.read, *self.sources)
        for step in self.body:
            if isinstance(step, Look):
                yield step.name
            elif isinstance(step, Run):
                yield from (name for name in step.makes if name is not None)

    def verify(self) -> Slice:
        """Check that each value is there when it is read and ends once; return the slice itself.

        Raises `GraphError`.
        """
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
            reads = {leaf.name for leaf in leaves(step.call) if isinstance(leaf, Name)}
            if not there.issuperset(reads):
                raise GraphError(f"{self.label}: {step.call} does not read what is there")
            if isinstance(step, Look):
                if step.name in there or step.name in RESERVED or step.of not in there:
                    raise GraphError(f"{self.label}: {step.call} cannot be called {step.name}")
                there.add(step.name)
                views[step.name] = step.of
                continue
            if len(step.makes) != 1 and not step.several:
                raise GraphError(f"{self.label}: {step.call} makes one value")
            if (step.state is not None) != (step.draws in ("remember", "replay")):
                raise GraphError(f"{self.label}: {step.call} repeats its draws without a state")
            if step.state is not None:
                states.append(step.state)
            if step.over is not None and step.over not in (*reads, *map(views.get, reads)):
                raise GraphError(f"{self.label}: {step.call} overwrites {step.over}, which it does not read")
            over = step.over
            for name in step.makes:
                if name is None:
                    continue
                if name in there or name in RESERVED or not name.isidentifier():
                    raise GraphError(f"{self.label}: {step.call} makes a second {name}")
                there.add(name)
                own.add(name)
        if over is not None or own != set(self.give) or len(self.give) > len(own):
            raise GraphError(f"{self.label}: gives {', '.join(self.give)}, has {', '.join(sorted(own))}")
        if states != list(range(self.states)) or RESERVED.intersection(entering):
            raise GraphError(f"{self.label}: generator states or names are not its own")
        return self


@dataclass(frozen=True)
class Enter:
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
    value: Argument
    """New value, from the environment."""


@dataclass(frozen=True)
class Count:
    """Add a number to integers of the caller's."""

    keys: tuple[str, ...]
    by: int


@dataclass(frozen=True)
class Function:
    """The forward, or one segment of the backward."""

    name: str
    comment: str
    body: tuple[Enter | Drop | Copy | Write | Count, ...]
    returns: tuple[Argument, ...]
    """From the environment."""
    pops: tuple[str, ...] = ()
    """Keys of what `returns` takes out of the environment."""


@dataclass(frozen=True)
class Listing:
    """All functions of a step: the forward first, then the backward's segments in order."""

    summary: str
    functions: tuple[Function, ...]
    arriving: tuple[str, ...]
    """Keys of the outputs' gradients, which are there when the backward starts."""

    def verify(self) -> Listing:
        """Check every slice, that the environment has what is taken and read, and that nothing ends or is
        overwritten while it is copied; return the listing itself. Raises `GraphError`."""
        there = _Environment()
        verified: set[int] = set()              # by identity: equal blocks call the very same ones
        for number, function in enumerate(self.functions):
            there.function = function.name
            if number == 1:
                there.keys.update(self.arriving)
            for step in function.body:
                if isinstance(step, Enter):
                    if id(step.slice) not in verified:
                        step.slice.verify()
                        verified.add(id(step.slice))
                    there.enter(step)
                elif isinstance(step, Drop):
                    there.end(step.keys)
                elif isinstance(step, Copy):
                    there.copy(step)
                elif isinstance(step, Write):
                    there.look(_keys_in(step.value))
            returned = _keys_in(function.returns)
            there.look(returned)
            if number == 0:
                there.hand_out(returned)
            there.end(function.pops)
        return self


def _keys_in(value: Argument) -> frozenset[str]:
    """Return the keys of the environment that a value comes from."""
    return frozenset(leaf.key for leaf in leaves(value) if isinstance(leaf, Held) and leaf.how != "source")


class _Environment:
    """Contents of the environment while a step runs, and which of them are being copied."""

    _AFTER: Mapping[CopyWord, tuple[CopyWord | None, ...]] = {
        "copy_out": (None,), "leave": ("copy_out",), "copy_in": ("leave", "arrive"), "arrive": ("copy_in",)}
    """Words that may come right before each word about a key."""

    def __init__(self) -> None:
        self.function = ""
        """Function that runs."""
        self.keys: set[str] = set()
        self._last: dict[str, CopyWord] = {}
        """Of each key that was copied, what was last done with it."""
        self._handed_out: frozenset[str] = frozenset()

    def enter(self, call: Enter) -> None:
        """Check a call of a slice."""
        part = call.slice
        if any(len(a) != len(b) for a, b in ((part.take, call.take), (part.read, call.read),
                                             (part.sources, call.sources), (part.give, call.give))) \
                or part.states != len(call.rng):
            raise self._wrong(f"calls {part.label} with other values than it has")
        missing = set(call.read) - self.keys
        if missing:
            raise self._wrong(f"{part.label} reads {', '.join(sorted(missing))}, which is not there")
        self._have_arrived((*call.take, *call.read))
        self.end(call.take)
        for key in call.give:
            if self._last.get(key) in ("copy_out", "copy_in"):
                raise self._wrong(f"{part.label} makes {key} while it is copied")
        self.keys.update(call.give)

    def look(self, keys: Iterable[str]) -> None:
        """Check that code outside of the slices may read these keys."""
        for key in keys:
            if key not in self.keys:
                raise self._wrong(f"reads {key}, which is not there")
        self._have_arrived(keys)

    def end(self, keys: Iterable[str]) -> None:
        """Remove keys that are freed, or whose storage is taken over."""
        for key in keys:
            if key not in self.keys:
                raise self._wrong(f"{key} ends, which is not there")
            if self._last.get(key) in ("copy_out", "copy_in"):
                raise self._wrong(f"{key} ends while it is copied")
            self.keys.discard(key)

    def copy(self, copy: Copy) -> None:
        """Check the beginning of a copy, or a wait for one."""
        key, word = copy.key, copy.word
        if self._last.get(key) not in self._AFTER[word] or (key in self.keys) != (word != "copy_in"):
            raise self._wrong(f"{word} of {key}, out of turn")
        if key in self._handed_out:
            raise self._wrong(f"{word} of {key}, which the caller has")
        self._last[key] = word
        if word == "leave":
            self.keys.discard(key)
        elif word == "copy_in":
            self.keys.add(key)

    def hand_out(self, keys: frozenset[str]) -> None:
        """Note that the forward returns these keys: the caller may keep them, and write to them."""
        for key in keys:
            if key in self._last:
                raise self._wrong(f"returns {key}, which is copied away")
        self._handed_out = keys

    def _have_arrived(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._last.get(key) == "copy_in":
                raise self._wrong(f"reads {key}, which has not arrived")

    def _wrong(self, why: str) -> GraphError:
        return GraphError(f"{self.function}: {why}")
