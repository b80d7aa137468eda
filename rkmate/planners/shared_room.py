"""Room that the parts of one step share: which schedule each part follows, so that together they fit.

While one part runs, each of the others holds what it saves. So a choice takes the sum of what all hold, and
once, the most that any of them takes on top of that while it runs. For each such bound, parts begin with the
schedule that saves least, and the gains that cost the fewest bytes a second are bought first (the greedy
algorithm for the linear relaxation of the multiple-choice knapsack problem: Sinha and Zoltners, Operations
Research 27, 1979).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """The figures of a schedule that a part may follow."""

    seconds: float
    """Of one call."""
    saved: int
    """Bytes that a call holds from its forward to its backward."""
    extra: int
    """Bytes that it takes on top of that while it runs."""


@dataclass(frozen=True)
class Item:
    """A part, and the ways to run it."""

    ways: Sequence[Way]
    calls: int = 1
    """How often it is called in a step: all of its calls follow one schedule."""


@dataclass(frozen=True)
class Choice:
    """A way for each part."""

    ways: tuple[int, ...]
    """The number of each part's way."""
    saved: int
    """Bytes that all parts hold together."""
    extra: int
    """Bytes on top of that, at most."""
    seconds: float

    @property
    def peak(self) -> int:
        """Bytes at once, at most."""
        return self.saved + self.extra


def share_out(items: Sequence[Item], limit: int, beside: int = 0) -> Choice | None:
    """Choose a way for each part, the fastest together within a limit; None where no choice fits.

    Args:
        items: the parts.
        limit: bytes for all.
        beside: bytes that something else takes while all parts hold what they save, and none runs.
    """
    found = [choice for extra in _extras(items)
             if (choice := _within(items, limit, max(extra, beside), extra)) is not None]
    return min(found, key=lambda c: (c.seconds, c.peak), default=None)


def smallest_limit(items: Sequence[Item], beside: int = 0) -> int:
    """Return the smallest limit for which `share_out` finds a choice, in bytes."""
    def saved(item: Item, extra: int) -> int:
        return item.calls * min(w.saved for w in item.ways if w.extra <= extra)

    return min((max(extra, beside) + sum(saved(i, extra) for i in items) for extra in _extras(items)),
               default=beside)


def _extras(items: Sequence[Item]) -> list[int]:
    """The bounds on what a part takes while it runs for which each part has a way."""
    least = max((min(w.extra for w in i.ways) for i in items), default=0)
    return sorted({w.extra for i in items for w in i.ways if w.extra >= least})


def _within(items: Sequence[Item], limit: int, reserved: int, extra: int) -> Choice | None:
    ladders = [_ladder(i.ways, extra) for i in items]
    taken = [0] * len(items)
    room = limit - reserved - sum(i.calls * i.ways[ladder[0]].saved
                                  for i, ladder in zip(items, ladders, strict=True))
    if room < 0:
        return None
    heap: list[tuple[float, int]] = []

    def offer(k: int) -> None:
        ladder, step = ladders[k], taken[k]
        if step + 1 < len(ladder):
            now, then = items[k].ways[ladder[step]], items[k].ways[ladder[step + 1]]
            heapq.heappush(heap, ((then.seconds - now.seconds) / (then.saved - now.saved), k))

    for k in range(len(items)):
        offer(k)
    while heap:
        _, k = heapq.heappop(heap)
        ladder, step = ladders[k], taken[k]
        price = items[k].calls * (items[k].ways[ladder[step + 1]].saved - items[k].ways[ladder[step]].saved)
        if price <= room:
            room -= price
            taken[k] += 1
            offer(k)
    numbers = tuple(ladder[t] for ladder, t in zip(ladders, taken, strict=True))
    chosen = [i.ways[n] for i, n in zip(items, numbers, strict=True)]
    return Choice(numbers, sum(i.calls * w.saved for i, w in zip(items, chosen, strict=True)),
                  max((w.extra for w in chosen), default=0),
                  sum(i.calls * w.seconds for i, w in zip(items, chosen, strict=True)))


def _ladder(ways: Sequence[Way], extra: int) -> list[int]:
    """The ways that each save a second for the fewest more bytes, from the leanest on: the lower convex
    hull."""
    order = sorted((k for k, w in enumerate(ways) if w.extra <= extra),
                   key=lambda k: (ways[k].saved, ways[k].seconds))
    hull: list[int] = []
    for k in order:
        if hull and ways[k].seconds >= ways[hull[-1]].seconds:
            continue
        while len(hull) > 1 and _slope(ways, hull[-2], k) <= _slope(ways, hull[-2], hull[-1]):
            hull.pop()
        hull.append(k)
    return hull


def _slope(ways: Sequence[Way], a: int, b: int) -> float:
    return (ways[b].seconds - ways[a].seconds) / max(1, ways[b].saved - ways[a].saved)
