"""Bytes, seconds and shares as people read them."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n: float) -> str:
    """``8.4 MiB``: the unit in which the number is below 1024, three digits."""
    value, unit = float(n), 0
    while abs(value) >= 1023.5 and unit < len(_BYTES) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{n:.0f} B"
    return f"{value:.{0 if abs(value) >= 99.5 else 1}f} {_BYTES[unit]}"


def duration(seconds: float) -> str:
    """``1.9 ms``: seconds, milliseconds or microseconds."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        value = seconds * factor
        if abs(value) >= 0.9995 or unit == "us":
            return f"{value:.{0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2}f} {unit}"
    raise AssertionError


def share(part: float, whole: float) -> str:
    """``32%``; ``-`` of nothing."""
    return f"{part / whole:.0%}" if whole else "-"


def count(n: int, noun: str, plural: str | None = None) -> str:
    """``1 block``, ``12 blocks``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
