"""Places to compute, behind one protocol: `of` gives the device of a tensor or of a name."""

from rkmate.device.protocol import Device, MemoryState, MeterError, MeterInUse, PartsMeter, Statistics
from rkmate.device.registry import accelerators, all_present, autocast_kinds, common, in_use, of, standing_in

__all__ = ["Device", "MemoryState", "MeterError", "MeterInUse", "PartsMeter", "Statistics",
           "accelerators", "all_present", "autocast_kinds", "common", "in_use", "of", "standing_in"]
