"""Link between a device's memory and another place: how fast it is, and when each copy and each collective
ends.

Copies have two clocks, in addition to that of the computations: copies out queue for one direction of the
link, copies in for the other (Beaumont et al., "Efficient combination of rematerialization and offloading",
NeurIPS 2021, combine both ways to save memory). Collectives have another one: they run one after the other,
in the order in which they start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rkmate.errors import ScheduleError


@dataclass(frozen=True)
class Link:
    """Connection between a device's memory and the target of its data. Bandwidths hold for both directions at
    once, while the device computes."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    seconds_per_copy: float = 0.0
    """Seconds of a copy, however small it is."""
    buffer_bytes: int = 0
    """Memory of the device that copying takes, from the start of a step to its end."""
    most_bytes: int | None = None
    """Bytes that may be away at once; None: no limit except the free space."""
    place: str = ""
    """Target of the link: ``"host"``, or a folder."""
    computing_seconds_per_byte: float = 0.0
    """Seconds that computing takes longer for each byte copied either way, if the same processor has to copy:
    it finds and clears pages, and shares its caches."""

    def seconds_out(self, size: int) -> float:
        """Return the seconds of one copy out of `size` bytes."""
        return self.seconds_per_copy + size / self.out_bytes_per_second

    def seconds_in(self, size: int) -> float:
        """Return the seconds of one copy back of `size` bytes."""
        return self.seconds_per_copy + size / self.in_bytes_per_second

    def content(self) -> dict[str, Any]:
        """Return the link as a JSON object."""
        return {k: v for k, v in vars(self).items() if v is not None}


def read_link(content: Any) -> Link | None:
    """Inverse of `Link.content`; None for None. Raises `TypeError` or `ValueError` if the content is
    invalid."""
    if content is None:
        return None
    link = Link(**content)
    rates = link.out_bytes_per_second, link.in_bytes_per_second
    seconds = link.seconds_per_copy, link.computing_seconds_per_byte
    whole = link.buffer_bytes, 0 if link.most_bytes is None else link.most_bytes
    if not all(type(v) in (int, float) and 0 <= v < math.inf for v in (*rates, *seconds)) or 0 in rates \
            or not all(type(v) is int and v >= 0 for v in whole) or not isinstance(link.place, str):
        raise ValueError(f"not a saved Link: {content!r}")
    return link


class Clocks:
    """End times of a step's computations, copies out, copies in and collectives. Seconds since the step's
    beginning."""

    def __init__(self, link: Link | None) -> None:
        self.link = link
        self.now = 0.0
        """Time of the computations."""
        self.stalled = 0.0
        """Seconds that computations have waited for copies."""
        self.out: list[tuple[int, float, float]] = []
        """(D node, start, end) of each copy out."""
        self.back: list[tuple[int, float, float]] = []
        """Copies in: D node, start, end."""
        self.exposed = 0.0
        """Seconds in which computations have waited for collectives."""
        self._exchanged = 0.0
        self._ends: dict[int, float] = {}
        self._sent: dict[int, float] = {}
        self._arrives: dict[int, float] = {}

    def run(self, c: int, seconds: float, exchanges: bool) -> None:
        """Run a C node whose inputs are in memory: compute, or wait for the collective that it is."""
        if exchanges:
            self.exchange(c, seconds)
        else:
            self.now += seconds

    def start(self, c: int, seconds: float) -> float:
        """Begin a collective, the C node `c`, after those before it. Return when it ends."""
        self._exchanged = self._ends[c] = max(self.now, self._exchanged) + seconds
        return self._exchanged

    def exchange(self, c: int, seconds: float) -> None:
        """Wait for the end of a collective, which begins now unless it has begun."""
        if c not in self._ends:
            self.start(c, seconds)
        waited = max(0.0, self._ends.pop(c) - self.now)
        self.exposed += waited
        self.now += waited

    def copy_out(self, d: int, size: int) -> None:
        """Begin a copy out: it waits for those before it."""
        start = max(self.now, self.out[-1][2] if self.out else 0.0)
        self._sent[d] = start + self._link().seconds_out(size)
        self.out.append((d, start, self._sent[d]))
        self._delay(size)

    def leave(self, d: int) -> None:
        """Wait for the end of a copy out."""
        self._wait(self._sent[d])

    def copy_in(self, d: int, size: int) -> None:
        """Begin a copy in."""
        start = max(self.now, self.back[-1][2] if self.back else 0.0)
        self._arrives[d] = start + self._link().seconds_in(size)
        self.back.append((d, start, self._arrives[d]))
        self._delay(size)

    def arrive(self, d: int) -> None:
        """Wait for the end of a copy in, where one is under way."""
        if self._arrives:
            self._wait(self._arrives.pop(d, 0.0))

    def _delay(self, size: int) -> None:
        self.now += self._link().computing_seconds_per_byte * size

    def _wait(self, until: float) -> None:
        if until > self.now:
            self.stalled += until - self.now
            self.now = until

    def _link(self) -> Link:
        if self.link is None:
            raise ScheduleError("the schedule copies data away, but the graph has no link")
        return self.link
