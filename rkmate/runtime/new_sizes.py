"""Captures of calls of new sizes, derived from those of other sizes.

Two full captures of a call at different sizes, and dry runs of both, give the graph of a third
(`rkmate.graph.sizes.resized`). Each call is a member of a family: the signatures that are equal except for
the lengths and strides of the arguments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rkmate.graph.capture.captured import Capture
from rkmate.graph.ops.properties import kind_of_number
from rkmate.graph.sizes.dry_run import Recording
from rkmate.graph.sizes.resized import KnownCall, compare_known, derived, known_call, possible
from rkmate.runtime.guards import Guards
from rkmate.support.planning_lock import capture_lock

logger = logging.getLogger("rkmate")

MEMBERS = 4
"""Captures that a new size is derived from, at most: the latest."""
NUMBERS = int, float
LATEST = 16
"""Signatures that are kept of those that differ in numbers alone, and whose captures were derived."""
SAID = (10, 100, 1000, 10_000, 100_000)
"""Numbers of new sizes after which a message says how long they took."""


@dataclass
class Member:
    """A signature that was captured in full."""

    key: Guards
    known: KnownCall

    def can_run(self, key: Guards) -> bool:
        """Return whether its dry run was made, or can be: with the attributes that it was captured with."""
        return self.known.recorded or self.key.attributes == key.attributes


@dataclass
class NewSizes:
    """Counts the sizes that were planned after the first one, and their seconds."""

    derived: int = 0
    """Number of sizes derived from captures of other sizes."""
    captured: int = 0
    """Number of sizes captured themselves."""
    seconds: float = 0.0

    def add(self, derived: bool, seconds: float) -> None:
        """Count one size. At the numbers in `SAID`, log how long all of them took."""
        if derived:
            self.derived += 1
        else:
            self.captured += 1
        self.seconds += seconds
        if self.count in SAID:
            logger.warning("%d new signatures planned in %.1f s so far, %d of them from captures of other "
                           "sizes", self.count, self.seconds, self.derived)

    @property
    def count(self) -> int:
        """Number of both."""
        return self.derived + self.captured


def alike(a: Guards, b: Guards) -> bool:
    """Return whether two signatures differ at most in the sizes of their arguments, and in numbers among
    arguments and attributes."""
    return len(a.inputs) == len(b.inputs) \
        and a._replace(inputs=b.inputs, constants=b.constants, attributes=b.attributes) == b and all(
            len(s[0]) == len(t[0]) and s[1:4] == t[1:4]
            and isinstance(s[4], tuple) and isinstance(t[4], tuple)
            for s, t in zip(a.inputs, b.inputs, strict=True)) \
        and _are_alike(a.constants, b.constants) \
        and (a.attributes == b.attributes or _are_alike(a.attributes.content, b.attributes.content))


def _are_alike(a: Any, b: Any) -> bool:
    """Return whether two parts of keys differ in numbers at most."""
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(_are_alike, a, b))
    return type(a) in NUMBERS or bool(a == b)


def numbers_in(part: Any) -> Iterator[int | float]:
    """Yield the numbers in a part of a key; of parts that are alike, in one order."""
    if type(part) in NUMBERS:
        yield part
    elif type(part) is tuple:
        for value in part:
            yield from numbers_in(value)


def members_for(key: Guards, members: Iterable[Member | None]) -> list[Member]:
    """Return the members of a key's family from which it may be derived, the latest last."""
    return [m for m in members if m is not None and comparable(key, m.key) and m.can_run(key)][-MEMBERS:]


def known_at(key: Guards, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any],
             recording: Recording | None) -> KnownCall:
    """Return a captured call as one from which others are derived."""
    return known_call(capture, args, kwargs, recording, numbers_of(key))


def comparable(key: Guards, other: Guards) -> bool:
    """Return whether no size that differs is 0 or 1, which torch treats otherwise (broadcasting, strides),
    and no number one that operators have a way of their own for. The signatures are alike."""
    *shapes, numbers = (zip(a, b, strict=True) for a, b in zip(sizes_of(key), sizes_of(other), strict=True))
    return all(a == b or min(a, b) > 1 for shape in shapes for a, b in shape) and all(
        a == b or kind_of_number(a) == kind_of_number(b) for a, b in numbers)


def outdated(key: Guards, others: Iterable[Guards]) -> list[Guards]:
    """Return the signatures (the latest last) that are not kept any longer: of those that differ from a key
    in numbers alone, all but the last few. What changes in each step seldom comes back."""
    return [k for k in others if k.inputs == key.inputs and k != key and alike(k, key)][:-LATEST]


def derive(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: Guards,
           members: Sequence[Member]) -> tuple[Capture | None, Recording | None]:
    """Return the capture of a call from those of its family, if that is certain; and the dry run of the
    call."""
    if not possible(sizes_of(key), [sizes_of(m.key) for m in members]):
        return None, None
    start = time.perf_counter()
    with capture_lock:
        found, new = derived(model, args, kwargs, [m.known for m in members], numbers_of(key))
    if new is not None:
        logger.debug("a call of another size: %s in %.2f s", "derived" if found is not None else
                     "to be captured, as its operations or sizes are not those of the known ones",
                     time.perf_counter() - start)
    return found, new


def compare(model: nn.Module, members: Sequence[Member]) -> None:
    """Do what further sizes of a family need of its captures: at a call that is captured in full it hardly
    counts, and at the first derived one it would be most of what that takes."""
    with capture_lock:
        compare_known(model, [m.known for m in members])


def numbers_of(key: Guards) -> tuple[float, ...]:
    """Return the floating-point numbers among a signature's arguments and attributes."""
    return tuple(n for n in sizes_of(key)[-1] if type(n) is float)


def sizes_of(key: Guards) -> list[Sequence[int | float]]:
    """Return the shapes of a signature's tensors, and its numbers."""
    return [*(place[0] for place in key.inputs), tuple(numbers_in((key.constants, key.attributes.content)))]
