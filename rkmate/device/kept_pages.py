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
from collections import Counter
from types import TracebackType

from rkmate.support.warn import warn

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, of malloc.h."""
_Heap = tuple[tuple[int, int], ...]
"""What it is to be like: parameters and their values."""
_LARGEST_IN_HEAP = 2**25
"""Bytes of the largest block that the heap can be told to hold, as long as it takes larger ones from the
system."""
_ONE_BY_ONE: _Heap = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, _LARGEST_IN_HEAP))
"""Larger blocks come from the system."""
_USUAL: _Heap = (*_ONE_BY_ONE, (_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP))
"""What `mallopt(3)` says of a process that has freed blocks of all sizes: the thresholds move with them, up
to these."""
_PLANNED: _Heap = (*_ONE_BY_ONE, (_TRIM_THRESHOLD, -1))
"""Blocks of such a process stay, but for those that the system gives one by one."""
_ALL: _Heap = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
"""Every block stays."""
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""In the environment: how the heap is to be, by who started the process."""
_lock = threading.RLock()
"""Taken again where collecting garbage ends a wish amid of another."""
_wishes: Counter[_Heap] = Counter()
"""How many want it so, to some effect, and are not over."""


class KeptPages:
    """Memory that is freed stays with the process until `release`, or the end of a `with`."""

    def __init__(self, wish: _Heap, *, effective: bool) -> None:
        self.effective = effective
        """Whether the heap does as it was told."""
        self._wish = wish
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
            before = _wished()
            _wishes[self._wish] -= 1
            if _wished() != before:
                heap = ctypes.CDLL(None)
                _tell(heap, _wished())
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
    reason = _wish(_ALL)
    if reason:
        warn(f"keep_pages() changes nothing: {reason}. Steps take fresh pages from the system, as without it")
    return KeptPages(_ALL, effective=not reason)


def keep_planned_pages() -> KeptPages:
    """The same for as long as planned steps run on the CPU, and for blocks of up to 32 MiB: they lie in one
    heap in any case, whose top the system gets back at the end of each step else. Nothing changes, and
    nothing is said, where `keep_pages` would change nothing, or where the environment says how the heap is
    to be."""
    return KeptPages(_PLANNED, effective=not (_said() or _wish(_PLANNED)))


def give_back_free_pages() -> None:
    """Let the system have the pages of what tensors have freed, now: what is made next takes fresh ones. Not
    within `keep_pages`, nor in another heap than that of the GNU C library."""
    with _lock:
        if _is_glibc() and not _wishes[_ALL]:
            ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _said() -> bool:
    return any(name in os.environ for name in _SAID) \
        or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def _wished() -> _Heap:
    return next((heap for heap in (_ALL, _PLANNED) if _wishes[heap]), _USUAL)


def _wish(heap: _Heap) -> str:
    """Count a wish; why it has no effect and does not count, if it has none."""
    with _lock:
        before = _wished()
        _wishes[heap] += 1
        reason = _told(before)
        _wishes[heap] -= bool(reason)
    return reason


def _told(before: _Heap) -> str:
    """Tell the heap what is wished, unless that was so before; why it does not do so, if it does not."""
    if not _is_glibc():
        return "it tells the heap of the GNU C library, on Linux, and this process has another one"
    wished = _wished()
    if wished == before:
        return ""
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread, whose heap it is about: call it there"
    heap = ctypes.CDLL(None)
    if not _tell(heap, wished):
        return "the C library refuses it"
    heap.malloc.restype = heap.sbrk.restype = ctypes.c_size_t
    heap.malloc.argtypes, heap.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    block = heap.malloc(2 * _LARGEST_IN_HEAP if wished == _ALL else _LARGEST_IN_HEAP // 2)
    in_heap = 0 < block < heap.sbrk(0)
    heap.free(block)
    if not in_heap:
        _tell(heap, _USUAL)
        heap.malloc_trim(0)
    return "" if in_heap else "memory comes from another allocator (LD_PRELOAD)"


def _tell(heap: ctypes.CDLL, wished: _Heap) -> bool:
    return all(heap.mallopt(*parameter) for parameter in wished)
