"""Calls that differ in sizes alone: which signatures are alike, and a capture from theirs.

Two full captures of a call at different sizes, and dry runs of both, give the graph of a third
(`rkmate.graph.capture.resized`). Each is a member of a family: the signatures that are equal but for the
lengths and strides of the arguments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rkmate.graph.capture import family
from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.dry_run import Recording
from rkmate.graph.capture.family import KnownCall, derived, possible
from rkmate.runtime.guards import Guards
from rkmate.support.planning_lock import capture_lock

logger = logging.getLogger("rkmate")

MEMBERS = 4
"""Captures that a new size is derived from, at most: the latest."""
SAID = (1, 10, 100, 1000, 10_000, 100_000)
"""After how many new sizes it is said how long they took."""


@dataclass
class Member:
    """A signature that was captured in full."""

    key: Guards
    known: KnownCall


@dataclass
class NewSizes:
    """How many sizes were planned after the first one, and how long that took."""

    derived: int = 0
    """From captures of other sizes."""
    captured: int = 0
    """By a capture of their own."""
    seconds: float = 0.0
    told: set[int] = field(default_factory=set)

    def add(self, derived: bool, seconds: float) -> None:
        """Count one; say so at the first, the tenth, the hundredth."""
        if derived:
            self.derived += 1
        else:
            self.captured += 1
        self.seconds += seconds
        count = self.derived + self.captured
        if count in SAID[1:]:
            logger.warning("%d new signatures planned in %.1f s so far, %d of them from captures of other "
                           "sizes", count, self.seconds, self.derived)


def alike(a: Guards, b: Guards) -> bool:
    """Whether two signatures differ in the sizes of their arguments at most."""
    return len(a.inputs) == len(b.inputs) and a._replace(inputs=b.inputs) == b and all(
        len(s[0]) == len(t[0]) and s[1:4] == t[1:4] and isinstance(s[4], tuple) and isinstance(t[4], tuple)
        for s, t in zip(a.inputs, b.inputs, strict=True))


def comparable(key: Guards, other: Guards) -> bool:
    """Whether no size that differs is 0 or 1, which torch treats otherwise (broadcasting, strides)."""
    return all(a == b or min(a, b) > 1 for s, t in zip(key.inputs, other.inputs, strict=True)
               for a, b in zip(s[0], t[0], strict=True))


def derive(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: Guards,
           members: Sequence[Member]) -> tuple[Capture | None, Recording | None]:
    """The capture of a call from those of its family, if that is certain; and the dry run of the call."""
    if not possible(shapes_of(key), [shapes_of(m.key) for m in members]):
        return None, None
    start = time.perf_counter()
    with capture_lock:
        found, new = derived(model, args, kwargs, [m.known for m in members])
    if new is not None:
        logger.debug("a call of another size: %s in %.2f s", "derived" if found is not None else
                     "to be captured, as its operations or sizes are not those of the known ones",
                     time.perf_counter() - start)
    return found, new


def compare(model: nn.Module, members: Sequence[Member]) -> None:
    """Do what further sizes of a family need of its captures: at a call that is captured in full it hardly
    counts, and at the first derived one it would be most of what that takes."""
    with capture_lock:
        family.compare(model, [m.known for m in members])


def shapes_of(key: Guards) -> list[Sequence[int]]:
    """The shapes of a signature's tensors."""
    return [place[0] for place in key.inputs]
