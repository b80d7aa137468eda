"""Estimate the time of an operation on a device that works while the host continues, without asking the
device.

The host's clock says there how long the call took, not the operation; to wait for the device at each
operation would leave it idle. So the time is that of the bytes and the arithmetic at the rates of a GPU.
Eviction compares times with each other: their ratios matter.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch.utils.flop_counter import flop_registry

from rkmate.devices import Rates
from rkmate.dtr.runtime.schema import map_tensors
from rkmate.torch_seam.schema import OpOverload

_RATES = Rates(2e12, 5e13, MappingProxyType({}), 4e-6)
"""Rates of a typical GPU."""


def expected_nanoseconds(function: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the greater of arithmetic and memory traffic, plus a call."""
    moved: list[int] = []
    map_tensors([*args, *kwargs.values(), result], lambda t: moved.append(t.numel() * t.element_size()))
    count = flop_registry.get(function.overloadpacket)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
    return int(1e9 * _RATES.seconds(flops / _RATES.flops_per_second, sum(moved)))
