"""The first training step, measured against its prediction where the device keeps statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rkmate import device as devices
from rkmate.device import Statistics
from rkmate.device.statistics import PeakWatch
from rkmate.support.warn import warn


def statistics_of(device: torch.device) -> Statistics | None:
    """The device's statistics; None for a device that keeps none (the CPU)."""
    return devices.of(device).statistics


def before_first_step(device: torch.device) -> None:
    """Libraries take what they keep before the step that is watched: it is no part of it."""
    devices.of(device).warm_up()


class FirstStep:
    """Watches one training step, from its forward to the end of its backward.

    The device's statistics are read and not reset. A step is judged by its peak where that is a new
    one since the statistics were last reset (by the user), else by the levels before and after it.
    """

    def __init__(self, statistics: Statistics, predicted: int, budget: int,
                 params: Iterable[torch.Tensor]) -> None:
        """`predicted`, `budget`: bytes above the level at the start, parameter gradients left out.
        `params`: those whose gradients the step makes."""
        self._predicted = predicted
        self._budget = budget
        self._new_gradients = sum(p.numel() * p.element_size() for p in params
                                  if p.requires_grad and p.grad is None)
        self._watch = PeakWatch(statistics)
        self.done = False
        self.peak: int | None = None
        """Bytes that the step took above what stood before it, new gradients included; once it is done."""

    def finish(self) -> None:
        """The backward is over: warn when the step took more than its budget."""
        self.done = True
        self.peak = peak = self._watch.peak() - self._watch.start
        allowed = self._budget + self._new_gradients
        if peak > allowed:
            warn(
                f"the first training step took {peak:,} bytes above what stood before it; predicted "
                f"were {self._predicted:,}, the budget is {self._budget:,}, and new parameter "
                f"gradients may add {self._new_gradients:,}. Something outside the planned module "
                "(the loss, hooks, other models) allocates during the step, or operations take "
                "other temporary memory here than when they were measured")
