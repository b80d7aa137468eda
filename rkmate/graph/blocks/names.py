"""Names that are given once each."""

from __future__ import annotations

import string
from collections.abc import Iterable


class NameTable:
    """Names of values that are seen together: each is given once, and none is a reserved word."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def copied(self) -> NameTable:
        """The same names given, to go on from apart."""
        made = NameTable()
        made._reserved, made._taken, made._counts = self._reserved, {*self._taken}, {**self._counts}
        return made

    def fresh(self, base: str) -> str:
        """`base` for the first one of this name, then ``base_2``, ``base_3``; a reserved word gets an
        underscore."""
        if base in self._reserved:
            return self.fresh(f"{base}_")
        name, n = base, self._counts.get(base, 0)
        while not n or name in self._taken or name in self._reserved:
            n += 1
            name = base if n == 1 else f"{base}_{n}"
        self._counts[base] = n
        self._taken.add(name)
        return name


def letters(n: int) -> str:
    """``a`` to ``z``, then ``aa``, ``ab`` ...: the letters of number `n`, counted from 0."""
    text = string.ascii_lowercase[n % 26]
    return letters(n // 26 - 1) + text if n >= 26 else text
