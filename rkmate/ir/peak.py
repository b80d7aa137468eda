"""Device memory of a call: the value that the meter returns and pictures draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Peak(Generic[T]):
    """Bytes that a call allocated, over the level at its entry."""

    peak: int
    """Highest level. Never negative: at entry it is zero."""
    net: int
    """Level at exit; the result, which is held, included."""
    seconds: float
    """Time of the call. On CPU the profiler's own work is in it."""
    result: T
    """Result of the call."""
    timeline: tuple[tuple[float, int], ...] = ()
    """(seconds since entry, level) after each allocation and each free, when asked for."""
