"""What the C library's heap does with memory that a CPU's tensors have freed.

The GNU C library takes a large block from the system when it is asked for it, and gives it back when it is
freed. So a training step writes to fresh pages, which the system has to find and clear, for all that it
holds, and does that again at the next step. A heap that keeps its pages spares that, and takes more memory
than the tensors in it: blocks of other sizes fit into its holes only in part.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from types import TracebackType

from rkmate.support.warn import warn

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, of malloc.h."""
_LARGE = 2**26
"""Bytes: no heap that takes large blocks from the system keeps such a one."""
_DEFAULTS = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))
"""What `mallopt(3)` says of a process that has freed blocks of all sizes: the thresholds move with them, up
to these."""
_lock = threading.Lock()
_kept = 0
"""How many have asked for it to some effect, and are not over."""


class KeptPages:
    """Memory that is freed stays with the process until `release`, or the end of a `with`."""

    def __init__(self, *, effective: bool) -> None:
        self.effective = effective
        """Whether the heap does as it was told."""
        self._over = False

    def release(self) -> None:
        """Give back what is free, and let the heap do so again. Twice is once; where several have asked for
        it, the last one counts."""
        global _kept
        with _lock:
            if self._over:
                return
            self._over = True
            _kept -= self.effective
            if self.effective and not _kept:
                _told_as_ever(ctypes.CDLL(None))

    def __enter__(self) -> KeptPages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()


def keep_pages() -> KeptPages:
    """Let this process keep the memory that tensors on the CPU free, so that steps need no fresh pages.

    It concerns the whole process, and tensors that its main thread makes, gradients included. What is counted
    against a budget stays as it is; resident memory is that of the largest step so far and the holes between
    blocks, and free memory serves no other process. When it is over, the heap gives back blocks of 32 MiB and
    more as they are freed, whatever thresholds the environment has set. On Linux with the GNU C library, from
    the main thread; elsewhere nothing changes, and a warning says so.

    Returns:
        What ends it, by its `release()` or as a context: ``with rkmate.keep_pages(): train()``.
    """
    global _kept
    with _lock:
        reason = _told()
        _kept += not reason
    if reason:
        warn(f"keep_pages() changes nothing: {reason}. Steps take fresh pages from the system, as without it")
    return KeptPages(effective=not reason)


def give_back_free_pages() -> None:
    """Let the system have the pages of what tensors have freed, now: what is made next takes fresh ones. Not
    where they are kept, nor in another heap than that of the GNU C library."""
    with _lock:
        if _is_glibc() and not _kept:
            ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _told() -> str:
    """Tell the heap to keep what is freed; why it does not, if it does not."""
    if not _is_glibc():
        return "it tells the heap of the GNU C library, on Linux, and this process has another one"
    if _kept:
        return ""
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread, whose heap it is about: call it there"
    heap = ctypes.CDLL(None)
    if not (heap.mallopt(_MMAP_MAX, 0) and heap.mallopt(_TRIM_THRESHOLD, -1)):
        return "the C library refuses it"
    heap.malloc.restype = heap.sbrk.restype = ctypes.c_size_t
    heap.malloc.argtypes, heap.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    block = heap.malloc(_LARGE)
    in_heap = 0 < block < heap.sbrk(0)
    heap.free(block)
    if not in_heap:
        _told_as_ever(heap)
    return "" if in_heap else "memory comes from another allocator (LD_PRELOAD)"


def _told_as_ever(heap: ctypes.CDLL) -> None:
    for parameter, value in _DEFAULTS:
        heap.mallopt(parameter, value)
    heap.malloc_trim(0)
