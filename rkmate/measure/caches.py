"""The processor's caches as an operation of a step finds them.

Run again and again, an operation finds what it reads where its last run has left it, and writes where its
last result was: products seem a tenth faster than they are between others, activations several times. A step
whose data is larger than the caches finds there what was made just before, and little else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from rkmate.device import Device
from rkmate.graph.capture.operations import is_view
from rkmate.ir.cd import CDGraph
from rkmate.measure.settings import MeasureSettings
from rkmate.torch_seam.nodes import VALUE

BEFORE = 3
"""What so many computations before one have made is still in the caches."""


def as_in_a_step(settings: MeasureSettings, device: Device, step_bytes: int) -> MeasureSettings:
    """The settings, which say whether caches are emptied. `step_bytes`: what goes through them in a step."""
    cold = step_bytes > device.cache_bytes if settings.cold is None else settings.cold
    return replace(settings, cold=cold and device.cache_bytes > 0)


def made_just_before(graph: CDGraph, i: int) -> list[int]:
    """Those of a C node's inputs that it finds in the caches."""
    return [j for j in graph.c[i].inputs
            if (made := graph.producer[j]) is not None and i - BEFORE <= made < i]


class Caches:
    """Empties the caches of a device between timed runs. Holds a buffer of their size."""

    def __init__(self, device: Device) -> None:
        self._bytes = device.cache_bytes
        self._buffer = torch.empty(self._bytes * 5 // 4, dtype=torch.uint8, device=device.torch_device)

    def empty(self, but: Iterable[torch.Tensor]) -> None:
        """Empty them, `but` for some tensors."""
        self._buffer.fill_(0)
        for value in but:
            if value.is_floating_point() and value.nbytes <= self._bytes // 2:
                value.sum()


def touched_bytes(graph: fx.Graph) -> int:
    """Bytes of all that a graph's operations make: what goes through the caches in a step."""
    values = [n.meta.get(VALUE) for n in graph.nodes if n.op == "call_function" and not is_view(n)]
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided)
