"""Peaks from the counters of an allocator. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol, TypeVar

from rkmate.device.protocol import PartsMeter, Statistics
from rkmate.ir.simulate import Peak

T = TypeVar("T")


class OwnStatistics(Statistics, Protocol):
    """Statistics of an allocator whose peak does not belong to the user."""

    def reset_peak(self) -> None:
        """Start to look for a new peak."""


def measured(statistics: OwnStatistics, run: Callable[[], Peak[T]]) -> Peak[T]:
    """Return the result of `run`, with the peak and the net that the allocator counts. The device must be
    idle before and after it. Resets the allocator's peak."""
    before = statistics.allocated()
    statistics.reset_peak()
    found = run()
    return replace(found, peak=statistics.peak() - before, net=statistics.allocated() - before)


class StatisticsMeter(PartsMeter):
    """The peak of each of several parts of one run. Resets the allocator's peak."""

    of_one_thread = False

    def __init__(self, statistics: OwnStatistics,
                 running: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """`running`: a context that is entered around the whole run."""
        self._statistics = statistics
        self._levels: dict[int, tuple[int, int]] = {}
        self._start = statistics.allocated()
        self._running = running

    def running(self) -> AbstractContextManager[object]:
        return self._running()

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        before = self._statistics.allocated()
        self._statistics.reset_peak()
        yield
        self._levels[number] = before - self._start, self._statistics.peak() - self._start

    def levels(self) -> dict[int, tuple[int, int]]:
        return self._levels


class PeakWatch:
    """The peak from now on, read without a reset: an allocator has one peak, which belongs to the user.

    If that peak rises (or the user resets it), the largest level since now is known. Otherwise it is at
    most the earlier peak, and only the levels that were seen are known to have been reached.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self.start = statistics.allocated()
        """Bytes alive when the watch began."""
        self._before = statistics.peak()

    def peak(self) -> int:
        """Return bytes alive at once since the watch began: the most that are known."""
        now = self._statistics.peak()
        return now if now != self._before else max(self.start, self._statistics.allocated())
