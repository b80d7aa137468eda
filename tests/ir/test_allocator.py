"""The model of torch's caching allocator, against what torch's own does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ir.allocator import MIB, Block, CachingAllocator, Segment, SegmentPart

KIB = 1 << 10


@pytest.mark.parametrize(("size", "reserved"), [
    (0, 0), (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB),
    (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB)])
def test_segments(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == allocator.peak == reserved


@pytest.mark.parametrize(("size", "reserved"), [
    (0, 0), (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (20 * MIB + 1, 40 * MIB),
    (50 * MIB, 60 * MIB)])
def test_pages_of_an_expandable_segment(size: int, reserved: int) -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(size)
    assert allocator.reserved == reserved


def test_requests_are_rounded() -> None:
    allocator = CachingAllocator()
    assert [block.size for n in (1, 512, 513) if (block := allocator.allocate(n))] == [512, 512, 1024]


def test_a_rest_of_a_mebibyte_is_not_split_off() -> None:
    for rest, split in ((MIB, False), (MIB + 512, True)):
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(12 * MIB))
        block = allocator.allocate(12 * MIB - rest)
        assert block is not None and block.size == 12 * MIB - rest * split
        assert allocator.free_bytes() == rest * split


def test_small_rests_are_split_off_in_the_small_pool() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(512)
    assert block is not None and block.size == 512 and allocator.free_bytes() == 2 * MIB - 512


def test_with_expandable_segments_every_rest_is_split_off() -> None:
    allocator = CachingAllocator(expandable=True)
    block = allocator.allocate(20 * MIB - 512)
    assert block is not None and block.size == 20 * MIB - 512 and allocator.free_bytes() == 512


def test_neighbours_join() -> None:
    allocator = CachingAllocator()
    a, b, c = (allocator.allocate(6 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 32 * MIB, "the free ones are no neighbours"
    allocator.free(b)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 32 * MIB


def test_segments_do_not_join() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(12 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(24 * MIB)
    assert allocator.reserved == 48 * MIB


def test_an_expandable_segment_grows_at_its_end() -> None:
    allocator = CachingAllocator(expandable=True)
    kept, last = allocator.allocate(30 * MIB), allocator.allocate(10 * MIB)
    allocator.free(last)
    allocator.allocate(45 * MIB)
    assert allocator.reserved == 80 * MIB, "ten are there, and two pages more"
    allocator.free(kept)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 80 * MIB


def test_the_best_fit_is_taken() -> None:
    allocator = CachingAllocator()
    sizes = [30 * MIB, 14 * MIB, 18 * MIB]
    for block in [allocator.allocate(n) for n in sizes]:
        allocator.free(block)
    block = allocator.allocate(13 * MIB)
    assert block is not None and block.size == 14 * MIB


def test_the_two_pools_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(10 * MIB))
    allocator.allocate(KIB)
    assert allocator.reserved == 12 * MIB


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(KIB)
    allocator.free(block)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)


@pytest.mark.parametrize("expandable", [False, True])
def test_it_begins_with_what_is_there(expandable: bool) -> None:
    there = Segment(small=False, blocks=(SegmentPart(8 * MIB, free=False), SegmentPart(12 * MIB, free=True)))
    allocator = CachingAllocator(expandable=expandable, segments=[there])
    assert (allocator.reserved, allocator.free_bytes()) == (20 * MIB, 12 * MIB)
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 20 * MIB


def test_the_peak_since_a_mark() -> None:
    allocator = CachingAllocator()
    allocator.allocate(20 * MIB)
    allocator.mark()
    assert allocator.peak == 20 * MIB


sizes = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB))


@settings(deadline=None, max_examples=30)
@given(expandable=st.booleans(), actions=st.lists(st.tuples(st.booleans(), sizes), max_size=60))
def test_blocks_never_overlap_and_all_bytes_are_somewhere(
        expandable: bool, actions: list[tuple[bool, int]]) -> None:
    allocator = CachingAllocator(expandable=expandable)
    held: list[Block] = []
    for frees, size in actions:
        if frees and held:
            allocator.free(held.pop(size % len(held)))
        else:
            block = allocator.allocate(size)
            assert block is not None and block.size >= size
            held.append(block)
        places = sorted((b.address, b.address + b.size) for b in held)
        assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))
        assert sum(b.size for b in held) + allocator.free_bytes() == allocator.reserved
    before = allocator.reserved
    for block in held:
        allocator.free(block)
    assert allocator.free_bytes() == allocator.reserved == before == allocator.peak
    free = [b for pool in allocator._pools.values() for b in pool.blocks.values()]
    assert not any(b.following is not None and b.following.free for b in free), "free neighbours are one"
