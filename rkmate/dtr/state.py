"""Buffers and generators, kept to be put back."""

from __future__ import annotations

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.random_state import RandomState


class State:
    """What a failed step must leave as it was: a module's buffers, and the generators' states."""

    def __init__(self, model: nn.Module) -> None:
        # Buffers are small beside activations; NumPy's memory keeps the copies out of the budget.
        self._buffers = [
            (b, b.detach().cpu().reshape(-1).view(torch.uint8).numpy().copy())
            for b in model.buffers()
            if b.layout is torch.strided
        ]
        self._random = RandomState.of(*devices.in_use())

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(torch.from_numpy(value).view(buffer.dtype).reshape(buffer.shape))
        self._random.restore()
