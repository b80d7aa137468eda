"""A heap that keeps the memory that CPU tensors have freed.

The GNU C library takes large blocks from the system and gives them back when they are freed, so a training
step writes to fresh pages, which the system finds and clears, at every step. A heap that keeps its pages
spares that. It takes more memory than the tensors in it, because blocks of other sizes fit into its holes
only in part.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from types import TracebackType
from typing import Any

from rkmate.support.warn import warn

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, from malloc.h."""
LARGEST = 2**25
"""Bytes of the largest block that the heap holds as long as the system gives larger blocks one by one."""
_KEEP = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, LARGEST), (_TRIM_THRESHOLD, 2 * LARGEST))
"""Values of a process that has freed blocks of all sizes, by the manual page `mallopt(3)`."""
_lock = threading.RLock()
"""Re-entrant: a finalizer of the caller may release pages inside of another call."""
_keeping = 0
"""Number of `KeptPages` that have an effect and are not released."""


class KeptPages:
    """A request that freed memory stays with the process, until `release` or the end of a `with`."""

    def __init__(self, *, effective: bool) -> None:
        self.effective = effective
        """Whether the heap keeps its pages."""
        self._held = effective

    def release(self) -> None:
        """Return free memory to the system, and let the heap do so again, unless others keep pages, too. A
        second call does nothing."""
        global _keeping
        with _lock:
            if self._held:
                self._held = False
                _keeping -= 1
                if not _keeping:
                    _tell(_USUAL)
                    _heap().malloc_trim(0)

    def __enter__(self) -> KeptPages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()


def keep_pages() -> KeptPages:
    """Let this process keep the memory that tensors on the CPU free, so that steps need no fresh pages.

    The effect covers the whole process, and all tensors that its main thread makes, gradients included,
    whether planned by rkmate or not. Bytes that count against a budget do not change. Resident memory is that
    of the largest step so far, plus holes between blocks; other processes cannot use the free part. After the
    end, the heap returns blocks of 32 MiB and more as they are freed, whatever thresholds the environment has
    set. Works on Linux with the GNU C library, from the main thread; otherwise nothing changes, and a warning
    says so.

    Returns:
        An object whose `release()` ends the effect; also a context: ``with rkmate.keep_pages(): train()``.
    """
    global _keeping
    with _lock:
        reason = "" if _keeping else _kept()
        _keeping += not reason
    if reason:
        warn(f"keep_pages() changes nothing: {reason}. Steps take fresh pages from the system, as without it")
    return KeptPages(effective=not reason)


def give_back_free_pages() -> None:
    """Return the pages of freed tensors to the system now; the next tensors take fresh pages. Does nothing
    inside `keep_pages`, nor with another heap than that of the GNU C library."""
    with _lock:
        if _is_glibc() and not _keeping:
            _heap().malloc_trim(0)


def _kept() -> str:
    """Let the heap keep its pages. Returns why that failed, or ``""``."""
    if not _is_glibc():
        return "it configures the heap of the GNU C library, on Linux, and this process has another one"
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread, whose heap it is about: call it there"
    if not _tell(_KEEP):
        _tell(_USUAL)
        return "the C library refuses it"
    heap = _heap()
    block = heap.malloc(2 * LARGEST)
    in_heap = 0 < block < heap.sbrk(0)
    heap.free(block)
    if in_heap:
        return ""
    _tell(_USUAL)
    heap.malloc_trim(0)
    return "memory comes from another allocator (LD_PRELOAD)"


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _heap() -> Any:
    heap = ctypes.CDLL(None)
    heap.malloc.restype = heap.sbrk.restype = ctypes.c_size_t
    heap.malloc.argtypes, heap.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    return heap


def _tell(parameters: tuple[tuple[int, int], ...]) -> bool:
    return all(_heap().mallopt(*parameter) for parameter in parameters)
