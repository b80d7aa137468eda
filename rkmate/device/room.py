"""Which bytes of a growing space are taken, and by whom they can be taken next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

PIECE = 2**18
"""Bytes: room that is not in one piece is made of pieces that are no smaller."""


class Extent(NamedTuple):
    """Bytes in a row."""

    offset: int
    size: int


class Room:
    """A space that grows where what is free does not do. All is in multiples of a block of bytes."""

    def __init__(self, block: int, grow: Callable[[Extent], None], *, step: int = 1) -> None:
        """`grow`: makes the space longer by an extent, in multiples of `step` bytes; what it raises, `take`
        raises, and nothing is taken."""
        self.block = block
        self.end = 0
        """How long the space is."""
        self._grow, self._step = grow, step
        self._free: list[Extent] = []
        self._given: deque[Extent] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> list[Extent]:
        """Room for so many bytes: one extent where there is one, else several."""
        need = -(-size // self.block) * self.block
        if not need:
            return []
        with self._lock:
            self._merge()
            for k, extent in enumerate(self._free):
                if extent.size >= need:
                    self._free[k:k + 1] = _after(extent, need)
                    return [Extent(extent.offset, need)]
            taken, left = [], []
            for extent in self._free:
                some = min(need, extent.size)
                if not need or some < min(PIECE, need):
                    left.append(extent)
                    continue
                taken.append(Extent(extent.offset, some))
                left.extend(_after(extent, some))
                need -= some
            if need:
                at_end = left and left[-1].offset + left[-1].size == self.end
                last = left.pop() if at_end else Extent(self.end, 0)
                more = Extent(self.end, -(-(need - last.size) // self._step) * self._step)
                self._grow(more)
                taken.append(Extent(last.offset, need))
                left.extend(_after(Extent(last.offset, last.size + more.size), need))
                self.end += more.size
            self._free = left
            return taken

    def give(self, extents: Iterable[Extent]) -> None:
        """Give room back. It takes no lock: the collector of garbage may call it at any place."""
        self._given.extend(extents)

    def _merge(self) -> None:
        if self._given:
            given = [self._given.popleft() for _ in range(len(self._given))]
            self._free = list(_merged(sorted([*self._free, *given])))


def _after(extent: Extent, size: int) -> list[Extent]:
    """What is left of an extent when its first bytes are taken."""
    return [Extent(extent.offset + size, extent.size - size)] if extent.size > size else []


def _merged(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Neighbours as one; extents come in order."""
    last: Extent | None = None
    for extent in extents:
        if last is not None and last.offset + last.size == extent.offset:
            last = Extent(last.offset, last.size + extent.size)
        else:
            if last is not None:
                yield last
            last = extent
    if last is not None:
        yield last
