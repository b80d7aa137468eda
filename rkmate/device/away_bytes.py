"""How much the calls of an engine have away, and how much they may."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from rkmate.errors import OffloadError


class Call(Protocol):
    """One that sends."""

    away_bytes: int
    """Of the storages that it has sent, until it is closed."""


class AwayBytes:
    """Of all open calls of one engine."""

    def __init__(self, place: str, most_bytes: int | None) -> None:
        self._place, self._most = place, most_bytes
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._counting = threading.Lock()

    def add(self, call: Call, size: int) -> None:
        """A call sends so many bytes. Raises `OffloadError`: more than may be away."""
        with self._counting:
            self._calls.add(call)
            away = sum(c.away_bytes for c in self._calls) + size
            if self._most is not None and away > self._most:
                raise OffloadError(f"{self._place}: {size:,} bytes more would make {away:,} bytes there, and "
                                   f"{self._most:,} may be (most_bytes)")
            call.away_bytes += size
