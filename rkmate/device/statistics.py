"""Peaks from the counters of an allocator. Sizes are bytes."""

from __future__ import annotations

from rkmate.device.protocol import Statistics


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
