"""The first training step, measured against its prediction where the device keeps statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from rkmate.support.warn import warn


class Statistics(Protocol):
    """What a device's allocator tells."""

    def allocated(self) -> int:
        """Bytes alive now."""

    def peak(self) -> int:
        """Most bytes alive since the last reset."""

    def reset(self) -> None:
        """Start to look for a new peak."""


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def statistics_of(device: torch.device) -> Statistics | None:
    """The device's statistics; None for a device that keeps none (the CPU)."""
    return _Cuda(device) if device.type == "cuda" else None


class FirstStep:
    """Watches one training step, from its forward to the end of its backward."""

    def __init__(self, statistics: Statistics, predicted: int, budget: int,
                 params: Iterable[torch.Tensor]) -> None:
        """`predicted`, `budget`: bytes above the level at the start, parameter gradients left out.
        `params`: those whose gradients the step makes."""
        self._statistics = statistics
        self._predicted = predicted
        self._budget = budget
        self._new_gradients = sum(p.numel() * p.element_size() for p in params
                                  if p.requires_grad and p.grad is None)
        statistics.reset()
        self._before = statistics.allocated()
        self.done = False

    def finish(self) -> None:
        """The backward is over: warn when the step took more than its budget."""
        self.done = True
        peak = self._statistics.peak() - self._before
        allowed = self._budget + self._new_gradients
        if peak > allowed:
            warn(
                f"the first training step took {peak:,} bytes above what stood before it; predicted "
                f"were {self._predicted:,}, the budget is {self._budget:,}, and new parameter "
                f"gradients may add {self._new_gradients:,}. Something outside the planned module "
                "(the loss, hooks, other models) allocates during the step, or operations take "
                "other temporary memory here than when they were measured")
