"""Bytes, seconds and shares as people read them."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n: float) -> str:
    """Return bytes in words, ``8.4 MiB``: three digits, in the unit in which the number is below 1024."""
    value, unit = float(n), 0
    while abs(value) >= 1023.5 and unit < len(_BYTES) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{n:.0f} B"
    return f"{value:.{0 if abs(value) >= 99.5 else 1}f} {_BYTES[unit]}"


def duration(seconds: float) -> str:
    """Return seconds in words, ``1.9 ms``: in seconds, milliseconds or microseconds."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        value = seconds * factor
        if abs(value) >= 0.9995 or unit == "us":
            return f"{value:.{0 if abs(value) >= 99.5 else 1 if abs(value) >= 9.95 else 2}f} {unit}"
    raise AssertionError


def share(part: float, whole: float) -> str:
    """Return a share in percent, ``32%``; ``-`` if the whole is zero."""
    return f"{part / whole:.0%}" if whole else "-"


def count(n: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 block``, ``12 blocks``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
