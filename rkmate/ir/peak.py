"""What a call took of a device's memory: the value that the meter returns and pictures draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Peak(Generic[T]):
    """What a call allocated, in bytes over the level at its entry."""

    peak: int
    """Highest level. Never negative: at entry it is zero."""
    net: int
    """Level at exit; the result, which is held, included."""
    seconds: float
    """Time of the call. On CPU the profiler's own work is in it."""
    result: T
    """What the call returned."""
    timeline: tuple[tuple[float, int], ...] = ()
    """(seconds since entry, level) after each allocation and each free, when asked for."""
