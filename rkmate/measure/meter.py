"""Exact memory of a computation: the greatest number of bytes alive at once.

CPU: the profiler's memory events, which are exact, operations' temporaries and the autograd
engine's threads included. CUDA: the caching allocator's statistics.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rkmate.errors import ArgumentError, RkmateError


class MeterError(RkmateError):
    """Memory cannot be measured now: the message says why."""


@dataclass(frozen=True)
class Peak:
    """What a call allocated. Bytes over the level at entry, and seconds."""

    peak: int
    """Greatest number of bytes alive at once, over the level at entry."""
    net: int
    """Bytes that are still there at the end, over the level at entry."""
    seconds: float
    result: Any = None
    """What the call returned."""
    timeline: tuple[tuple[float, int], ...] = ()
    """(seconds since entry, bytes over the level at entry) after each change; CPU only."""


def measure_peak(fn: Callable[[], Any], device: torch.device | str | None = None, *,
                 timeline: bool = False) -> Peak:
    """Run `fn` and measure the memory that it takes.

    Raises `MeterError` when another profiler runs, or when the device keeps no statistics, and
    whatever `fn` raises.
    """
    device = torch.device(device or "cpu")
    if device.type == "cpu":
        return _cpu(fn, timeline)
    if device.type == "cuda":
        return _cuda(fn, device)
    raise ArgumentError(f"device is {device}; memory can be measured on cpu and cuda")


def _cuda(fn: Callable[[], Any], device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    result = fn()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return Peak(torch.cuda.max_memory_allocated(device) - before,
                torch.cuda.memory_allocated(device) - before, seconds, result)


def _cpu(fn: Callable[[], Any], timeline: bool) -> Peak:
    with _profiler() as profiler:
        start = time.perf_counter()
        result = fn()
        seconds = time.perf_counter() - start
    events = _memory_events(profiler)
    live = peak = 0
    points: list[tuple[float, int]] = []
    for at, change in events:
        live += change
        peak = max(peak, live)
        if timeline:
            points.append(((at - events[0][0]) * 1e-9, live))
    return Peak(peak, live, seconds, result, tuple(points))


class PartsMeter:
    """The peak of each of several parts of one run, at the price of one measurement."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: dict[int, int] = {}
        self._profiler: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The run that the parts belong to."""
        if self._device.type == "cpu":
            with _profiler() as self._profiler:
                yield
        else:
            yield

    @contextlib.contextmanager
    def part(self, number: int) -> Iterator[None]:
        """One part; its number must be its own."""
        if self._device.type == "cpu":
            with torch.autograd.profiler.record_function(f"{_MARK}{number}"):
                yield
        else:
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self._cuda[number] = torch.cuda.max_memory_allocated(self._device) - before

    def peaks(self) -> dict[int, int]:
        """Part -> greatest number of bytes over the level at its start."""
        if self._device.type != "cpu":
            return self._cuda
        events = _memory_events(self._profiler)
        marks = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name()[len(_MARK):]))
                       for e in self._profiler.kineto_results.events() if e.name().startswith(_MARK))
        result: dict[int, int] = {}
        k = 0
        for start, end, number in marks:
            while k < len(events) and events[k][0] < start:
                k += 1
            live = peak = 0
            while k < len(events) and events[k][0] <= end:
                live += events[k][1]
                peak = max(peak, live)
                k += 1
            result[number] = peak
        return result


_MARK = "rkmate part "


@contextlib.contextmanager
def _profiler() -> Iterator[Any]:
    if torch._C._autograd._profiler_enabled():
        raise MeterError("another profiler is running, and there can be only one: measure outside it")
    profiler = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
    with _quiet():
        profiler.__enter__()
    try:
        yield profiler
    finally:
        with _quiet():
            profiler.__exit__(None, None, None)


def _memory_events(profiler: Any) -> list[tuple[int, int]]:
    """(nanoseconds, change in bytes) of each allocation and each free, in order."""
    events = [(e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events()
              if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
    events.sort(key=lambda e: e[0])
    return events


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's C++ side logs to standard error when it starts and stops."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before
