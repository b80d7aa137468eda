"""Exact memory of a computation: the greatest number of bytes alive at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from rkmate import device as devices
from rkmate.device import MeterError
from rkmate.device.events import tracking
from rkmate.ir.peak import Peak

__all__ = ["MeterError", "measure_peak", "tracking"]

T = TypeVar("T")


def measure_peak(fn: Callable[[], T], device: torch.device | str | None = None, *,
                 timeline: bool = False) -> Peak[T]:
    """Call `fn` and measure the memory that it allocates on `device`.

    On CUDA the caching allocator's history is read: the bytes that are asked for, in multiples of 512,
    without what blocks have beside them; its statistics stay as they are. On CPU the profiler is asked for
    the event of each allocation and each free, which includes the temporary memory inside operations. What
    does not come from torch's CPU allocator (scratch memory of math libraries, NumPy, Python) is not seen,
    and neither is what a thread allocates that the call starts by itself; the threads of the autograd
    engine are.

    Args:
        fn: called once, in this thread.
        device: CPU unless given.
        timeline: also return the level after each event.

    Returns:
        Peak and net in bytes over the level at entry. On CPU, frees of blocks that were allocated
        before entry count only under `tracking`: without it their sizes are not known, and the peak
        is at most over-estimated by them.

    Raises:
        MeterError: a profiler is running, or another thread measures.
        ArgumentError: the device is neither a CPU nor a CUDA device.
        Exception: whatever `fn` raises.
    """
    return devices.of("cpu" if device is None else device).measure_peak(fn, timeline=timeline)
