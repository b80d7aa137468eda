"""How the C library's heap treats memory that CPU tensors have freed.

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
from collections import Counter
from types import TracebackType

from rkmate.support.warn import warn

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, of malloc.h."""
_Heap = tuple[tuple[int, int], ...]
"""A configuration of the heap: parameters and their values."""
_LARGEST_IN_HEAP = 2**25
"""Bytes of the largest block that the heap can be told to hold, as long as it takes larger ones from the
system."""
_ONE_BY_ONE: _Heap = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, _LARGEST_IN_HEAP))
"""Larger blocks come from the system."""
_USUAL: _Heap = (*_ONE_BY_ONE, (_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP))
"""The configuration that `mallopt(3)` describes for a process that has freed blocks of all sizes: the
thresholds move with the blocks, up to these values."""
_PLANNED: _Heap = (*_ONE_BY_ONE, (_TRIM_THRESHOLD, -1))
"""The configuration for planned modules: blocks stay, except those that the system gives one by one."""
_ALL: _Heap = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
"""Every block stays."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables that configure the heap."""
_lock = threading.RLock()
"""Re-entrant, because a garbage collection may release one request while another is being made."""
_requests: Counter[_Heap] = Counter()
"""Number of active requests for each configuration."""


class KeptPages:
    """A request that freed memory stays with the process, until `release` or the end of a `with`."""

    def __init__(self, requested: _Heap, *, effective: bool) -> None:
        self.effective = effective
        """Whether the heap follows the request."""
        self._requested = requested
        self._over = False

    def release(self) -> None:
        """Return free memory to the system, and let the heap do so again, unless another request is active. A
        second call does nothing."""
        with _lock:
            if self._over:
                return
            self._over = True
            if not self.effective:
                return
            before = _strongest()
            _requests[self._requested] -= 1
            if _strongest() != before:
                heap = ctypes.CDLL(None)
                _set(heap, _strongest())
                heap.malloc_trim(0)

    def __enter__(self) -> KeptPages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()


def keep_pages() -> KeptPages:
    """Let this process keep the memory that tensors on the CPU free, so that steps need no fresh pages.

    This holds for the whole process, and for all tensors that its main thread makes, gradients included.
    (Planned modules by themselves keep only blocks of up to 32 MiB: `Settings.keep_pages`.) Bytes that count
    against a budget do not change. Resident memory is that of the largest step so far, plus holes between
    blocks; other processes cannot use the free part. After the end, the heap returns blocks of 32 MiB and
    more as they are freed, whatever thresholds the environment has set. Works on Linux with the GNU C
    library, from the main thread; otherwise nothing changes, and a warning says so.

    Returns:
        An object whose `release()` ends this; also a context: ``with rkmate.keep_pages(): train()``.
    """
    reason = _request(_ALL)
    if reason:
        warn(f"keep_pages() changes nothing: {reason}. Steps take fresh pages from the system, as without it")
    return KeptPages(_ALL, effective=not reason)


def keep_planned_pages() -> KeptPages:
    """Keep pages as long as planned steps run on the CPU, for blocks of up to 32 MiB. Such blocks are in one
    heap anyway, whose top would otherwise go back to the system at the end of each step. Nothing changes, and
    no warning is given, if `keep_pages` would change nothing, or if the environment configures the heap."""
    return KeptPages(_PLANNED, effective=not (_configured() or _request(_PLANNED)))


def give_back_free_pages() -> None:
    """Return the pages of freed tensors to the system now; the next tensors take fresh pages. Does nothing
    inside `keep_pages`, nor with another heap than that of the GNU C library."""
    with _lock:
        if _is_glibc() and not _requests[_ALL]:
            ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _configured() -> bool:
    return any(name in os.environ for name in _VARIABLES) \
        or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def _strongest() -> _Heap:
    """Return the configuration of the strongest active request."""
    return next((heap for heap in (_ALL, _PLANNED) if _requests[heap]), _USUAL)


def _request(heap: _Heap) -> str:
    """Count and apply a request. Returns why it has no effect (it then does not count), or ``""``."""
    with _lock:
        before = _strongest()
        _requests[heap] += 1
        reason = _apply_strongest(before)
        if reason:
            _requests[heap] -= 1
    return reason


def _apply_strongest(before: _Heap) -> str:
    """Set malloc's parameters for the strongest active request, if they differ from `before`. Returns why
    that failed, or ``""``."""
    if not _is_glibc():
        return "it configures the heap of the GNU C library, on Linux, and this process has another one"
    strongest = _strongest()
    if strongest == before:
        return ""
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread, whose heap it is about: call it there"
    heap = ctypes.CDLL(None)
    if not _set(heap, strongest):
        return "the C library refuses it"
    heap.malloc.restype = heap.sbrk.restype = ctypes.c_size_t
    heap.malloc.argtypes, heap.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    block = heap.malloc(2 * _LARGEST_IN_HEAP if strongest == _ALL else _LARGEST_IN_HEAP // 2)
    in_heap = 0 < block < heap.sbrk(0)
    heap.free(block)
    if not in_heap:
        _set(heap, _USUAL)
        heap.malloc_trim(0)
    return "" if in_heap else "memory comes from another allocator (LD_PRELOAD)"


def _set(heap: ctypes.CDLL, configuration: _Heap) -> bool:
    return all(heap.mallopt(*parameter) for parameter in configuration)
