"""The peak and the time of a call, or of a whole training step, as measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device import MeterError
from rkmate.device.events import make_way, tracking
from rkmate.errors import ArgumentError
from rkmate.ir.simulate import Peak

__all__ = ["MeterError", "measure_peak", "measure_step", "tracking"]

T = TypeVar("T")


def measure_peak(fn: Callable[[], T], device: torch.device | str | None = None, *,
                 timeline: bool = False) -> Peak[T]:
    """Call `fn` and measure the memory that it allocates on `device`.

    On CUDA, the meter reads the caching allocator's history: requested bytes, in multiples of 512, without
    the rest of the blocks. The allocator's statistics do not change. On CPU, the meter reads the profiler's
    event of each allocation and each free, which includes the temporary memory inside operations. It does not
    see memory that does not come from torch's CPU allocator (scratch memory of math libraries, NumPy,
    Python), nor allocations of threads that the call starts itself. It sees those of autograd's threads.

    Args:
        fn: called once, in this thread.
        device: the CPU by default.
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


def measure_step(module: nn.Module, step: Callable[[], T], *, timeline: bool = True) -> Peak[T]:
    """Run a training step twice and measure the second run: its peak, and its memory over time.

    A budget does not count gradients of parameters, so they are allocated before the measurement and
    restored after it. Buffers (batch-norm statistics) are updated twice. Parameters are not updated,
    unless the step does so.

    Args:
        module: the module to train, wrapped or not, on CPU or on one CUDA device.
        step: runs forward and backward of one batch, without optimizer and ``zero_grad``:
            ``lambda: module(x).loss.backward()``.
        timeline: also return the bytes in use after each allocation and each free.

    Returns:
        Bytes on top of the memory in use when the step begins. Pass the result to ``plan.plot`` or
        ``plan.report``.

    Raises:
        MeterError: a profiler is running.
        ArgumentError: the module has no parameters, or is on several devices or on a device whose memory
            cannot be measured.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    places = {p.device for p in module.parameters()}
    if len(places) != 1:
        raise ArgumentError("the module has no parameters, which tell the device to measure: measure a "
                            "module that contains them" if not places else "the module is on several "
                            f"devices: {', '.join(sorted(map(str, places)))}; measure the part on each "
                            "by itself")
    device = devices.of(places.pop())
    before = [None if p.grad is None else p.grad.detach().clone() for p in trained]
    make_way()                                   # what rkmate measures of a step before ends with that step
    try:
        step()                                   # first-time work stays out of the measurement
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        measured: Peak[Any] = device.measure_peak(step, timeline=timeline)
        return measured
    finally:
        for p, grad in zip(trained, before, strict=True):
            p.grad = grad
