"""A process that keeps its pages: what its heap is told, and where a large block then lies."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import threading
from typing import Any

import pytest

import rkmate
from rkmate.device import kept_pages

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


class Heap:
    """A C library that writes down what it is told."""

    def __init__(self, *, accepts: bool = True, in_heap: bool = True) -> None:
        self.told: list[tuple[int, ...]] = []
        self.trimmed = 0
        self._accepts = accepts
        self._block = 1 if in_heap else 3
        self.malloc, self.sbrk, self.free = _Call(self._block), _Call(2), _Call(None)

    def mallopt(self, parameter: int, value: int) -> int:
        self.told.append((parameter, value))
        return int(self._accepts)

    def malloc_trim(self, pad: int) -> int:
        self.trimmed += 1
        return 1


class _Call:
    restype = argtypes = None

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self, *args: Any) -> Any:
        return self._result


def heap(monkeypatch: pytest.MonkeyPatch, **how: bool) -> Heap:
    made = Heap(**how)
    monkeypatch.setattr(kept_pages, "_is_glibc", lambda: True)
    monkeypatch.setattr(kept_pages.ctypes, "CDLL", lambda name: made)
    return made


KEEP, USUAL = [(-4, 0), (-1, -1)], [(-4, 65536), (-3, 2**25), (-1, 2**26)]


def test_the_heap_is_told_once_and_told_back_at_the_last_release(monkeypatch: pytest.MonkeyPatch) -> None:
    found = heap(monkeypatch)
    kept_pages.give_back_free_pages()
    assert found.trimmed == 1
    outer, inner = rkmate.keep_pages(), rkmate.keep_pages()
    assert outer.effective and inner.effective and found.told == KEEP
    kept_pages.give_back_free_pages()           # they are kept
    outer.release()
    outer.release()
    assert found.told == KEEP and found.trimmed == 1
    inner.release()
    assert found.told == KEEP + USUAL and found.trimmed == 2
    with rkmate.keep_pages() as again:
        assert found.told == KEEP + USUAL + KEEP
    again.release()
    assert found.told == KEEP + USUAL + KEEP + USUAL and found.trimmed == 3


@pytest.mark.parametrize(("how", "reason", "told"), [
    ({"accepts": False}, "the C library refuses it", KEEP[:1] + USUAL[:1]),
    ({"in_heap": False}, "memory comes from another allocator", KEEP + USUAL)])
def test_a_heap_that_does_not_do_as_it_is_told(how: dict[str, bool], reason: str, told: list[tuple[int, int]],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    found = heap(monkeypatch, **how)
    with pytest.warns(rkmate.RkmateWarning, match=f"changes nothing: {reason}"), rkmate.keep_pages() as kept:
        assert not kept.effective
    assert found.told == told


def test_another_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = heap(monkeypatch), []
    monkeypatch.setattr(kept_pages, "warn", said.append)
    thread = threading.Thread(target=rkmate.keep_pages)
    thread.start()
    thread.join()
    assert not found.told and "this is not the main thread" in said[0]


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(ctypes, "CDLL", None)
    kept_pages.give_back_free_pages()
    with pytest.warns(rkmate.RkmateWarning, match="changes nothing: it configures the heap of the GNU C"), \
            rkmate.keep_pages() as kept:
        assert not kept.effective


IN_HEAP = """
from rkmate.device import kept_pages
library = kept_pages._heap()

def in_heap():
    block = library.malloc(2 * kept_pages.LARGEST)
    library.free(block)
    return 0 < block < library.sbrk(0)

with kept_pages.keep_pages() as kept:
    assert kept.effective and in_heap()
assert not in_heap()
"""


@GLIBC
def test_a_large_block_lies_in_the_heap_until_it_is_over() -> None:
    """In a process of its own: in the heap of another one, a hole may be as large."""
    subprocess.run([sys.executable, "-c", IN_HEAP], check=True)


def test_planned_modules_leave_the_c_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    found, model = heap(monkeypatch), torch.nn.Linear(8, 8)
    module = rkmate.wrap(model, (torch.randn(4, 8),), budget=1.0, progress=False,
                         settings=rkmate.Settings(costs="analytic"))
    module(torch.randn(4, 8)).sum().backward()
    assert not found.told
