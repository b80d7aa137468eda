"""What the C library's heap does with memory that a CPU's tensors have freed.

The GNU C library takes a large block from the system when it is asked for it, and gives it back when it is
freed. So a training step writes to fresh pages, which the system has to find and clear, for all that it
holds, and does that again at the next step. A heap that keeps its pages spares that, and takes more memory
than the tensors in it: blocks of other sizes fit into its holes only in part.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rkmate.support.warn import warn

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, of malloc.h."""
_LARGEST_IN_HEAP = 2**25
"""Bytes of the largest block that the heap can be told to hold, as long as it takes larger ones from the
system."""
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, _LARGEST_IN_HEAP), (_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP))
"""What `mallopt(3)` says of a process that has freed blocks of all sizes: the thresholds move with them, up
to these."""
_PLANNED = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, _LARGEST_IN_HEAP), (_TRIM_THRESHOLD, -1))
"""Blocks of such a process stay, but for those that the system gives one by one."""
_ALL = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
"""Every block stays."""
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""In the environment: how the heap is to be, by who started the process."""
_lock = threading.RLock()
"""Taken again where collecting garbage ends a wish amid of another."""


@dataclass
class _Wishes:
    """How many want pages to stay, to some effect, and are not over."""

    all: int = 0
    planned: int = 0


_wishes = _Wishes()


class KeptPages:
    """Memory that is freed stays with the process until `release`, or the end of a `with`."""

    def __init__(self, *, effective: bool, planned: bool = False) -> None:
        self.effective = effective
        """Whether the heap does as it was told."""
        self._planned = planned
        self._over = False

    def release(self) -> None:
        """Give back what is free, and let the heap do so again. Twice is once; where several have asked for
        it, the last one counts."""
        with _lock:
            if self._over:
                return
            self._over = True
            if not self.effective:
                return
            if self._planned:
                _wishes.planned -= 1
            else:
                _wishes.all -= 1
            if not _wishes.all:
                heap = ctypes.CDLL(None)
                _tell(heap)
                if not (self._planned and _wishes.planned):
                    heap.malloc_trim(0)

    def __enter__(self) -> KeptPages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()


def keep_pages() -> KeptPages:
    """Let this process keep the memory that tensors on the CPU free, so that steps need no fresh pages.

    It concerns the whole process, and tensors that its main thread makes, gradients included: all of them,
    where planned modules keep those of up to 32 MiB by themselves (`Settings.keep_pages`). What is counted
    against a budget stays as it is; resident memory is that of the largest step so far and the holes between
    blocks, and free memory serves no other process. When it is over, the heap gives back blocks of 32 MiB and
    more as they are freed, whatever thresholds the environment has set. On Linux with the GNU C library, from
    the main thread; elsewhere nothing changes, and a warning says so.

    Returns:
        What ends it, by its `release()` or as a context: ``with rkmate.keep_pages(): train()``.
    """
    with _lock:
        _wishes.all += 1
        reason = _told(already=_wishes.all > 1)
        _wishes.all -= bool(reason)
    if reason:
        warn(f"keep_pages() changes nothing: {reason}. Steps take fresh pages from the system, as without it")
    return KeptPages(effective=not reason)


def keep_planned_pages() -> KeptPages:
    """The same for as long as planned steps run on the CPU, and for blocks of up to 32 MiB: they lie in one
    heap in any case, whose top the system gets back at the end of each step else. Nothing changes, and
    nothing is said, where `keep_pages` would change nothing, or where the environment says how the heap is
    to be."""
    with _lock:
        _wishes.planned += 1
        effective = not (_said() or _told(already=bool(_wishes.all) or _wishes.planned > 1))
        _wishes.planned -= not effective
    return KeptPages(effective=effective, planned=True)


def give_back_free_pages() -> None:
    """Let the system have the pages of what tensors have freed, now: what is made next takes fresh ones. Not
    within `keep_pages`, nor in another heap than that of the GNU C library."""
    with _lock:
        if _is_glibc() and not _wishes.all:
            ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _said() -> bool:
    return any(name in os.environ for name in _SAID) \
        or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def _told(*, already: bool) -> str:
    """Tell the heap what is wished, unless it knows already; why it does not do so, if it does not."""
    if not _is_glibc():
        return "it tells the heap of the GNU C library, on Linux, and this process has another one"
    if already:
        return ""
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread, whose heap it is about: call it there"
    heap = ctypes.CDLL(None)
    if not _tell(heap):
        return "the C library refuses it"
    heap.malloc.restype = heap.sbrk.restype = ctypes.c_size_t
    heap.malloc.argtypes, heap.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    block = heap.malloc(2 * _LARGEST_IN_HEAP if _wishes.all else _LARGEST_IN_HEAP // 2)
    in_heap = 0 < block < heap.sbrk(0)
    heap.free(block)
    if not in_heap:
        _set(heap, _USUAL)
        heap.malloc_trim(0)
    return "" if in_heap else "memory comes from another allocator (LD_PRELOAD)"


def _tell(heap: ctypes.CDLL) -> bool:
    return _set(heap, _ALL if _wishes.all else _PLANNED if _wishes.planned else _USUAL)


def _set(heap: ctypes.CDLL, parameters: Sequence[tuple[int, int]]) -> bool:
    return all(heap.mallopt(*parameter) for parameter in parameters)
