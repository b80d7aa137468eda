"""What copies data away for all plans of a module, or of modules that share a budget."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from rkmate import device as devices
from rkmate.device.copy_engine import CopyEngine
from rkmate.pipeline.offload import Offload


class Engines:
    """One engine for each device, made when it is first needed, closed when nobody has this any more. All
    calls of an engine together keep to what may be away."""

    def __init__(self, offload: Offload | None) -> None:
        self.offload = offload
        self._lock = threading.Lock()
        self._made: dict[torch.device, CopyEngine] = {}

    def __reduce__(self) -> Any:
        """A copy has engines of its own."""
        return Engines, (self.offload,)

    def of(self, device: torch.device) -> CopyEngine:
        """The engine of a device. Raises `ArgumentError` where nothing can be sent from there."""
        assert self.offload is not None, "a plan that sends nothing"
        with self._lock:
            found = self._made.get(device)
            if found is None:
                found = self._made[device] = self.offload.engine(devices.of(device))
                weakref.finalize(self, found.close)
            return found
