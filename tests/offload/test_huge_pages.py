"""Huge pages for memory that is about to be filled: who asks the system for them, and for what."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rkmate import device as devices
from rkmate.offload import disk as disk_copies
from rkmate.offload import disk as huge_pages
from rkmate.offload.disk import ask_for_huge_pages

SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
SMAPS = Path("/proc/self/smaps")


def asked(start: int, end: int) -> list[tuple[int, int]]:
    """The parts of this memory that the system was asked for huge pages for."""
    found: list[tuple[int, int]] = []
    low = high = 0
    for line in SMAPS.read_text(encoding="ascii").splitlines():
        if about := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(word, 16) for word in about.groups())
        elif line.startswith("VmFlags:") and " hg" in line and start < high and low < end:
            found.append((max(low, start), min(high, end)))
    return found


@pytest.mark.skipif(not SIZE.exists() or not SMAPS.exists(), reason="a system without huge pages")
def test_whole_pages_inside_are_asked_for() -> None:
    page = int(SIZE.read_text(encoding="ascii"))
    with mmap.mmap(-1, 5 * page) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        inside = -(-start // page) * page
        ask_for_huge_pages(inside - 64, page)
        ask_for_huge_pages(inside + 64, page)
        assert not asked(start, start + 5 * page)
        ask_for_huge_pages(inside + 64, 3 * page)
        assert asked(start, start + 5 * page) == [(inside + page, inside + 3 * page)]


@pytest.mark.parametrize("content", [None, "", "-4096", "many"])
def test_a_system_that_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    file = tmp_path / "size"
    if content is not None:
        file.write_text(content, encoding="ascii")
    monkeypatch.setattr(huge_pages, "_SIZE", file)
    huge_pages._system.cache_clear()
    try:
        assert huge_pages._system() == (0, None)
        ask_for_huge_pages(2**21, 2**24)
    finally:
        huge_pages._system.cache_clear()


@pytest.mark.filterwarnings("ignore:.* is memory:rkmate.errors.RkmateWarning")
def test_what_comes_back_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    real: Callable[[int, int], None] = ask_for_huge_pages

    def noted(address: int, size: int) -> None:
        found.append((address, size))
        real(address, size)

    monkeypatch.setattr(disk_copies, "ask_for_huge_pages", noted)
    tensor = torch.arange(2**20)
    call = devices.of("cpu").copy_engine(str(tmp_path)).open()
    call.out("a", tensor)
    call.leave("a")
    assert not found
    back = call.back("a")
    call.arrive("a")
    call.close()
    assert found == [(back.untyped_storage().data_ptr(), 2**23)] and torch.equal(back, tensor)
