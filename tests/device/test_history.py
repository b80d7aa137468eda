"""What is read from the history of an allocator."""

from __future__ import annotations

from typing import Any

import pytest

from rkmate.device import MeterError
from rkmate.device.history import levels, levels_of_parts, since
from rkmate.device.protocol import peaks_over


def alloc(size: int, text: str = "") -> dict[str, Any]:
    return {"action": "alloc", "size": size, "time_us": 7, "user_metadata": text}


def free(size: int, text: str = "") -> dict[str, Any]:
    return {"action": "free_completed", "size": size, "time_us": 8, "user_metadata": text}


def mark(text: str) -> list[dict[str, Any]]:
    return [alloc(1, text), {**free(1, text), "action": "free_requested"}, free(1, text)]


def up(size: int) -> int:
    return -(-size // 512) * 512


def test_levels_count_requests_and_what_is_free_again() -> None:
    entries = [alloc(5), {**alloc(2 << 20), "action": "segment_alloc"}, alloc(600),
               {**free(5), "action": "free_requested"}, free(5), free(9000)]
    assert [level for _, level in levels(entries, up)] == [512, 1536, 1024, 1024 - up(9000)]
    assert [us for us, _ in levels(entries, up)] == [7, 7, 8, 8]


def test_only_what_comes_after_the_start_counts() -> None:
    entries = [alloc(9), *mark("start 1"), alloc(3)]
    assert since(entries, "start 1") == [alloc(3)]
    with pytest.raises(MeterError, match="too short"):
        since(entries[-1:], "start 1")


def test_parts() -> None:
    entries = [*mark("rkmate part 4"), alloc(600), free(600), alloc(5, "the user's"), *mark("rkmate end"),
               alloc(90000), *mark("rkmate part 2"), free(90000), alloc(512), *mark("rkmate end"),
               *mark("rkmate part 3"), *mark("rkmate end")]
    assert peaks_over(levels_of_parts([entries], up, [0])) == {4: 1024, 2: 0, 3: 0}


def test_parts_after_a_pause_begin_where_it_has_ended() -> None:
    def part(number: int, *entries: dict[str, Any]) -> list[dict[str, Any]]:
        return [*mark(f"rkmate part {number}"), *entries, *mark("rkmate end")]

    histories = [[alloc(1024), *part(0, alloc(512)), free(512)], part(1, alloc(600)), part(2, free(600))]
    assert levels_of_parts(histories, up, [0, 3, -7]) == {
        0: (1024, 1536), 1: (1027, 2051), 2: (2044, 2044)}
