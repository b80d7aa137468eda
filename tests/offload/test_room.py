"""Room in a space that grows."""

from __future__ import annotations

import random

import pytest

from rkmate.offload.copies import PIECE, Extent, Room


def test_extents_are_nobodys_twice_and_the_space_is_no_longer_than_it_has_to_be() -> None:
    numbers, grown = random.Random(0), list[Extent]()
    room, held = Room(4096, grown.append), dict[int, list[Extent]]()
    most = 0
    for turn in range(2000):
        if held and numbers.random() < 0.5:
            room.give(held.pop(numbers.choice(list(held))))
        else:
            size = int(2 ** numbers.uniform(0, 24))
            held[turn] = room.take(size)
            assert sum(e.size for e in held[turn]) == -(-size // 4096) * 4096
        taken = sorted(e for extents in held.values() for e in extents)
        assert all(a.offset + a.size <= b.offset for a, b in zip(taken, taken[1:], strict=False))
        most = max(most, sum(e.size for e in taken))
    assert most <= room.end <= most + 400 * PIECE
    assert [g.offset for g in grown] == [sum(g.size for g in grown[:k]) for k in range(len(grown))]
    room.give(e for extents in held.values() for e in extents)
    assert room.take(room.end) == [Extent(0, room.end)]


def test_room_that_is_not_in_one_piece_is_made_of_several() -> None:
    room = Room(4096, lambda _: None)
    parts = [room.take(PIECE) for _ in range(6)]
    for part in parts[::2]:
        room.give(part)
    assert room.take(3 * PIECE) == [e for part in parts[::2] for e in part]
    for part in parts[1::2]:
        room.give(part)
    assert room.take(4 * PIECE) == [*(e for part in parts[1::2] for e in part), Extent(6 * PIECE, PIECE)]
    assert room.take(0) == []


def test_what_cannot_grow_is_as_it_was() -> None:
    def grow(extent: Extent) -> None:
        if extent.offset + extent.size > 3 * 4096:
            raise OSError("full")

    room = Room(4096, grow)
    first = room.take(8192)
    room.give(first)
    with pytest.raises(OSError, match="full"):
        room.take(5 * 4096)
    assert room.take(8000) == first
    assert room.take(1) == [Extent(8192, 4096)]


def test_it_grows_in_steps() -> None:
    room = Room(512, lambda extent: None, step=4096)
    assert room.take(100) == [Extent(0, 512)]
    assert room.end == 4096
    assert room.take(3584) == [Extent(512, 3584)]
    assert room.take(5000) == [Extent(4096, 5120)]
    assert room.end == 3 * 4096


def test_what_is_free_at_the_end_is_made_longer() -> None:
    room = Room(4096, lambda extent: None)
    room.take(3 * 4096)
    last = room.take(2 * 4096)
    room.give(last)
    assert room.take(3 * 4096) == [Extent(3 * 4096, 3 * 4096)]
    assert room.end == 6 * 4096
