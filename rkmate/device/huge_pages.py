"""Fewer and larger pages for memory that is about to be filled.

Memory that the C library takes anew has no pages yet. The system finds and clears one at each first write,
also where a disk writes: of 4 KiB each that takes the processor longer than all else about a copy, of 2 MiB
each it hardly takes any time. Linux gives those to who asks for them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE = 14
"""Of sys/mman.h."""


def ask_for_huge_pages(address: int, size: int) -> None:
    """Let memory that will be written to have huge pages, where whole ones fit into it. A wish: where the
    system knows none, or has none left, there are small ones."""
    page, advise = _system()
    if advise is None:
        return
    start, end = -(-address // page) * page, (address + size) // page * page
    if start < end:
        advise(start, end - start, _MADV_HUGEPAGE)


@functools.cache
def _system() -> tuple[int, Callable[[int, int, int], int] | None]:
    """Bytes of a huge page, and what asks for some; 0 and None where there is no such thing."""
    try:
        page = int(_SIZE.read_text(encoding="ascii"))
        advise = ctypes.CDLL(None).madvise
    except (OSError, ValueError, AttributeError, TypeError):
        return 0, None
    if sys.platform != "linux" or page <= 0:
        return 0, None
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return page, advise
