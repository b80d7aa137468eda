"""The eviction heuristics: which storage leaves memory next. `HEURISTICS` has all of them by name.

A heuristic gives each storage a score, and evicts the least. The paper is
Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from rkmate.dtr.neighbourhood import EvictedClasses, EvictedRegions, Tracker
from rkmate.dtr.pool import Columns, Pick, Pool, last_minimum
from rkmate.errors import ArgumentError


class Heuristic(Protocol):
    """Chooses the storage to evict next."""

    @property
    def name(self) -> str:
        """The name that the command line and the runtime take."""

    @property
    def tracker(self) -> Callable[[Columns], Tracker]:
        """Class of the neighbourhood whose costs this heuristic reads from ``columns.around``."""

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        """Return the member of ``pool`` to evict; the pool is not empty."""


class Numbers(NamedTuple):
    """Numbers that a score is made of: exact ones of one storage, or arrays with those of several."""

    cost: Any
    around: Any
    """Cost of the neighbourhood."""
    size: Any
    last_access: Any
    clock: int

    @property
    def staleness(self) -> Any:
        """Time since the last access."""
        return self.clock - self.last_access


@dataclass(frozen=True)
class Ratio:
    """A heuristic whose score is a quotient; the least score is evicted."""

    name: str
    tracker: Callable[[Columns], Tracker]
    parts: Callable[[Numbers], tuple[Any, Any]]
    """Numerator and denominator."""

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        """Return the least score in ``pool``, as a scan in insertion order finds it."""
        rows = pool.rows()

        def exact(row: int) -> float:
            node = columns.nodes[row]
            assert node is not None
            above, below = self.parts(Numbers(
                node.cost, int(columns.around[row]), node.size, node.last_access, clock))
            return above / below if below > 0 else math.inf

        return last_minimum(rows, *self.parts(Numbers(
            columns.cost[rows], columns.around[rows], columns.size[rows], columns.last_access[rows], clock)),
            exact)


class Random:
    """A storage drawn evenly from the pool."""

    name = "random"
    tracker = Tracker

    def __init__(self, seed: int = 0) -> None:
        self._source = random.Random(seed)

    def choose(self, pool: Pool, columns: Columns, clock: int) -> Pick:
        rows = pool.rows()
        return Pick(int(rows[self._source.randrange(0, len(rows))]), False, 1)


def _full(n: Numbers) -> tuple[Any, Any]:
    """``(cost(S) + cost of the neighbourhood) / (size(S) * staleness(S))``."""
    return n.cost + n.around, n.size * n.staleness


def _per_byte(n: Numbers) -> tuple[Any, Any]:
    """``(cost(S) + cost of the neighbourhood) / size(S)``."""
    return n.cost + n.around, n.size


_RATIOS = (
    Ratio("dtr", EvictedRegions, _full),                        # section 2, appendix C.3
    Ratio("dtr-eq", EvictedClasses, _full),                     # section 4.1, appendix C.3
    Ratio("dtr-local", Tracker, _full),                         # section 4.1, appendix C.3
    Ratio("lru", Tracker, lambda n: (n.last_access, 1)),        # section 2: the greatest staleness
    Ratio("size", Tracker, lambda n: (1, n.size)),              # section 2: GreedyRemat, Kumar et al. 2019
    Ratio("msps", partial(EvictedRegions, ancestors_only=True), _per_byte),     # section 2: Peng et al. 2020
    Ratio("e*", EvictedRegions, _per_byte),                     # appendix A.3, theorem 3.1
)
"""Sections are the paper's."""


def _always(made: Heuristic, seed: int) -> Heuristic:
    return made


HEURISTICS: dict[str, Callable[[int], Heuristic]] = {
    **{ratio.name: partial(_always, ratio) for ratio in _RATIOS}, "random": Random}
"""Makers by name; each takes the seed, which only ``random`` uses."""

_ALIASES = {"dtreqclass": "dtr-eq", "dtrlocal": "dtr-local", "largeststorage": "size", "e-star": "e*",
            "estar": "e*", "randomstorage": "random", "rand": "random"}
"""Names in the paper and its simulator, without ``h_`` and with ``-`` for ``_``."""


def make_heuristic(name: str, seed: int = 0) -> Heuristic:
    """Make a fresh heuristic for one run.

    ``name`` is a key of ``HEURISTICS`` or one of the names that the paper and its simulator use,
    in any case. Raises ``ArgumentError`` for any other.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"heuristic must be a name, not {type(name).__name__}")
    key = name.lower().removeprefix("h_").replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in HEURISTICS:
        raise ArgumentError(f"heuristic {name!r} is unknown; known: {', '.join(HEURISTICS)}")
    return HEURISTICS[key](seed)
