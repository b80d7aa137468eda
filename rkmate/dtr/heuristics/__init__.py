"""The eviction heuristics by name."""

from __future__ import annotations

from collections.abc import Callable

from rkmate.dtr.heuristics.chance import Random
from rkmate.dtr.heuristics.classes import Classes
from rkmate.dtr.heuristics.full import Full
from rkmate.dtr.heuristics.local import Local
from rkmate.dtr.heuristics.lru import LeastRecentlyUsed
from rkmate.dtr.heuristics.msps import MemorySavingPerSecond
from rkmate.dtr.heuristics.neighbourhood import Neighbourhood
from rkmate.dtr.heuristics.protocol import Heuristic
from rkmate.dtr.heuristics.size import Largest
from rkmate.errors import ArgumentError

HEURISTICS: dict[str, Callable[[int], Heuristic]] = {
    "dtr": lambda seed: Full(),
    "dtr-eq": lambda seed: Classes(),
    "dtr-local": lambda seed: Local(),
    "lru": lambda seed: LeastRecentlyUsed(),
    "size": lambda seed: Largest(),
    "msps": lambda seed: MemorySavingPerSecond(),
    "e*": lambda seed: Neighbourhood(),
    "random": lambda seed: Random(seed),
}
"""Makers by name; each takes the seed, which only ``random`` uses."""

_ALIASES = {
    "h_dtr": "dtr",
    "dtreqclass": "dtr-eq",
    "dtr_eq": "dtr-eq",
    "h_dtr-eq": "dtr-eq",
    "h_dtr_eq": "dtr-eq",
    "dtrlocal": "dtr-local",
    "dtr_local": "dtr-local",
    "h_dtr-local": "dtr-local",
    "h_dtr_local": "dtr-local",
    "h_lru": "lru",
    "largeststorage": "size",
    "h_size": "size",
    "h_msps": "msps",
    "h_e*": "e*",
    "e-star": "e*",
    "estar": "e*",
    "randomstorage": "random",
    "h_rand": "random",
    "h_random": "random",
}


def make_heuristic(name: str, seed: int = 0) -> Heuristic:
    """A fresh heuristic: one run's own.

    ``name`` is a key of ``HEURISTICS`` or one of the names that the paper and its simulator use,
    in any case. Raises ``ArgumentError`` for any other.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"heuristic must be a name, not {type(name).__name__}")
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in HEURISTICS:
        raise ArgumentError(f"heuristic {name!r} is unknown; known: {', '.join(HEURISTICS)}")
    return HEURISTICS[key](seed)


__all__ = ["HEURISTICS", "Heuristic", "make_heuristic"]
