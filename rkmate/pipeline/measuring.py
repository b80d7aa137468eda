"""Measuring on a device that others have filled: with what is free, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rkmate import device as devices
from rkmate.errors import DeviceMemoryError
from rkmate.measure.costs import Costs

PART_OF_FREE = 0.8
"""How much of what is free measuring may take where it has run out of memory: an operation may take more than
is known before it has run."""


def measured_within(measure: Callable[[Callable[[], int] | None], Costs], limit: Callable[[], int] | None,
                    device: torch.device, name: str) -> Costs:
    """What `measure` returns, which is told how many bytes it may take; once more with less, where the device
    has not that much. `name`: of the model.

    Raises:
        DeviceMemoryError: too little is free even for single operations.
    """
    try:
        return measure(limit)
    except torch.OutOfMemoryError:
        pass                # left first: the error holds the values of what ran
    place = devices.of(device)
    place.give_back()
    memory = place.memory()
    free = 0 if memory is None else memory.free + memory.cached
    wanted = None if limit is None else limit()
    less = int(PART_OF_FREE * free)
    try:
        return measure(lambda: less if wanted is None else min(less, wanted))
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"there is too little memory on {device} to measure the operations of {name}: {free:,} bytes are "
            'free. Free some (other models, other processes), count costs (Settings(costs="analytic")), or '
            "plan on an emptier device, save the plan and give it to wrap (plan=)") from error
