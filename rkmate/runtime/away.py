"""What one call has copied away: opened with its forward, closed at the end of its backward, or where the
call is forgotten."""

from __future__ import annotations

import torch

from rkmate.device.copy_engine import CopyEngine


class Away:
    """The copies of one call. Raises `OffloadError` where the place fails, as its engine does."""

    __slots__ = ("_step", "buffer_bytes")

    def __init__(self, engine: CopyEngine, *, verify: bool = False) -> None:
        """`verify`: whether what comes back must have the checksum of what went."""
        self.buffer_bytes = engine.buffer_bytes
        """Of the device."""
        self._step = engine.open(verify=verify)

    def out(self, key: str, value: torch.Tensor) -> None:
        """Begin to copy a value away."""
        self._step.out(key, value)

    def leave(self, key: str) -> None:
        """Wait for the end of that; its memory is then free, where nobody else refers to the value."""
        self._step.leave(key)

    def back(self, key: str) -> torch.Tensor:
        """Make room for a value, and begin to copy it back."""
        return self._step.back(key)

    def arrive(self, key: str) -> None:
        """Wait for the end of that."""
        self._step.arrive(key)

    def close(self) -> None:
        """Give up what is under way, and free everything."""
        self._step.close()

    def __del__(self) -> None:
        """A forward whose backward never came."""
        if hasattr(self, "_step"):          # its engine may have refused
            self._step.close()
