"""A model of torch's caching allocator, of one device and one stream, without torch. Sizes are bytes.

The allocator takes memory from the device in segments, and hands out blocks of them: the smallest free one
that is large enough, its rest split off where that is worth it; a block that is freed joins its free
neighbours. Requests up to 1 MiB and larger ones have a pool of segments each. What it holds may be well
above what tensors take: blocks that are not split, and free ones that are too small.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
ROUNDING = 512
"""Blocks are multiples of this number of bytes."""
SMALL = MIB
"""The largest request of the small pool; and in the large one, a rest up to it is not split off."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""Bytes of the segment for a request below `OWN_SEGMENT`."""
OWN_SEGMENT = 10 * MIB
"""A request of at least this size gets a segment of its own size, in multiples of `SMALL_SEGMENT`."""


@dataclass(frozen=True)
class SegmentPart:
    """A part of a segment, in its current state."""

    size: int
    free: bool


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator has from the device, in its current state."""

    small: bool
    """Whether the segment belongs to the pool of small blocks."""
    blocks: tuple[SegmentPart, ...]
    """Blocks in the order of their addresses."""


class Block:
    """A part of a segment that was handed out, or is free."""

    __slots__ = ("address", "following", "free", "pool", "preceding", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.free = False
        self.preceding: Block | None = None
        self.following: Block | None = None


class _Pool:
    """The free blocks of small or of large requests."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int]] = []
        """(size, address), the best fit first."""
        self.blocks: dict[int, Block] = {}
        """Free ones, by address."""
        self.last: Block | None = None
        """The last block of the pool's expandable segment."""

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]


class CachingAllocator:
    """Hands out blocks as torch does, and counts what it takes from the device for that."""

    def __init__(self, *, expandable: bool = False, segments: Iterable[Segment] = ()) -> None:
        """`expandable`: whether segments are expandable: then a pool has one segment, which grows at its end.
        `segments`: the allocator's segments at the start."""
        self.expandable = expandable
        self.reserved = 0
        """Bytes of all segments."""
        self.peak = 0
        """The most that was reserved since the start, or the last `mark`."""
        self._pools = {small: _Pool(small=small) for small in (True, False)}
        self._next = 0
        self._began_with = tuple(segments)
        for segment in self._began_with:
            self._take_over(segment)
        self.mark()

    def mark(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.reserved

    def allocate(self, size: int) -> Block | None:
        """Return a block for a request; None for one of no bytes."""
        if size == 0:
            return None
        size = -(-size // ROUNDING) * ROUNDING
        pool = self._pools[size <= SMALL]
        block = self._best(pool, size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grown(pool, size) if self.expandable else self._segment(pool, _segment_size(size))
        rest = block.size - size
        if rest >= ROUNDING if pool.small or self.expandable else rest > SMALL:
            self._split(block, size)
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back."""
        if block is None:
            return
        if block.free:
            raise ValueError("the block is free already")
        pool = block.pool
        for other in (block.preceding, block.following):
            if other is not None and other.free:
                pool.remove(other)
                block = self._joined(*sorted((other, block), key=lambda b: b.address))
        pool.add(block)

    def again(self, *, expandable: bool | None = None) -> CachingAllocator:
        """Return another allocator in this one's initial state. With a value for `expandable`: in the state
        that this one would have begun in with or without expandable segments, if its blocks had been
        requested one after another."""
        if expandable is None or expandable == self.expandable:
            return CachingAllocator(expandable=self.expandable, segments=self._began_with)
        result = CachingAllocator(expandable=expandable)
        for segment in self._began_with:
            for block in segment.blocks:
                if not block.free:
                    result.allocate(block.size)
        result.mark()
        return result

    def free_bytes(self) -> int:
        """Return the bytes of free blocks in reserved memory."""
        return sum(size for pool in self._pools.values() for size, _ in pool.free)

    def _best(self, pool: _Pool, size: int) -> Block | None:
        at = bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        block = pool.blocks[pool.free[at][1]]
        # A block that can grow counts as one of the size that it can grow to.
        if block is pool.last and at + 1 < len(pool.free):
            block = pool.blocks[pool.free[at + 1][1]]
        return block

    def _segment(self, pool: _Pool, size: int) -> Block:
        block = Block(self._next, size, pool)
        self._next += size + 1              # segments are no neighbours
        self._reserve(size)
        return block

    def _grown(self, pool: _Pool, size: int) -> Block:
        """Return a block at the end of the pool's expandable segment, which grows by whole pages."""
        last = pool.last
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        there = last.size if last is not None and last.free else 0
        more = -(-(size - there) // page) * page
        self._reserve(more)
        if last is not None and last.free:
            pool.remove(last)
            last.size += more
            return last
        # Far apart, so that the segment of one pool does not grow into another's.
        start = (2 + (not pool.small)) << 60 if last is None else last.address + last.size
        block = Block(start, more, pool)
        if last is not None:
            last.following, block.preceding = block, last
        pool.last = block
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool)
        block.size = size
        self._link(block, rest, block.following)
        block.pool.add(rest)

    def _joined(self, block: Block, other: Block) -> Block:
        block.size += other.size
        self._link(block, other.following)
        if other is block.pool.last:
            block.pool.last = block
        return block

    @staticmethod
    def _link(*blocks: Block | None) -> None:
        """Make blocks neighbours, in this order."""
        for block, following in zip(blocks[:-1], blocks[1:], strict=True):
            assert block is not None
            block.following = following
            if following is not None:
                following.preceding = block
            if block.pool.last is block and following is not None:
                block.pool.last = following

    def _take_over(self, segment: Segment) -> None:
        pool = self._pools[segment.small]
        before: Block | None = None
        for held in segment.blocks:
            block = Block(self._next, held.size, pool)
            self._next += held.size
            self._reserve(held.size)
            if before is not None:
                before.following, block.preceding = block, before
            if held.free:
                pool.add(block)
            before = block
        if self.expandable:
            pool.last = before
        self._next += 1


def _segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
