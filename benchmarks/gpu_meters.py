"""What one step takes of a GPU and of its host."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

MIB = 2**20
HOST_SECONDS = 2
Row = dict[str, Any]


def measured(step: Callable[[], Any], model: nn.Module, steps: int) -> Row:
    """Peaks in MiB; milliseconds on the device and of the host; launches and waits of one step."""
    for _ in range(3):
        step()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    row: Row = {f"{kind}_mib": (after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"]) / MIB
                for kind in ("allocated", "requested")}
    row["reserved_mib"] = after["reserved_bytes.all.peak"] / MIB
    device, host = [], []
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin = time.process_time()
        start.record()
        step()
        end.record()
        host.append(time.process_time() - begin)
        end.synchronize()
        device.append(start.elapsed_time(end))
    return row | {"ms": statistics.median(device), "host_ms": 1e3 * min(host), "launches": launches(step),
                  "waits": waits(step)}


def launches(step: Callable[[], Any]) -> int | None:
    """Kernels, copies and fills of one step; None where the profiler sees none. A stub of CUDA's runtime
    (``CUDA_STUB`` names it) counts them itself."""
    stub = os.environ.get("CUDA_STUB")
    if stub is not None:
        before, after = ((ctypes.c_long * 11)() for _ in range(2))
        count = ctypes.CDLL(stub).fake_counts
        count(before)
        step()
        count(after)
        return sum(after[k] - before[k] for k in (0, 3, 8))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(e.device_type is torch.autograd.DeviceType.CUDA for e in seen.events() or ()) or None


def waits(step: Callable[[], Any]) -> int:
    """How often one step makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in seen)


def host_of(step: Callable[[], Any], other: Callable[[], Any], rounds: int) -> float:
    """The least processor time of a step, of another one's. They take turns: what else the machine does slows
    both. `rounds`: at least, and for some seconds."""
    best = [float("inf")] * 2
    gc.collect()
    gc.disable()
    end = time.perf_counter() + HOST_SECONDS
    for k in itertools.count():
        if k % 2 == 0 and k >= 2 * (rounds + 1) and time.perf_counter() > end:
            break
        start = time.process_time()
        (step, other)[k % 2]()
        if k > 1:                   # the first of each finds its memory
            best[k % 2] = min(best[k % 2], time.process_time() - start)
    gc.enable()
    return best[0] / best[1]
