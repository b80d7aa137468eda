"""CUDA devices (and AMD's, which torch calls so, too). The caching allocator keeps statistics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rkmate.device import events
from rkmate.device.protocol import MemoryState
from rkmate.device.statistics import StatisticsMeter, measured
from rkmate.ir.peak import Peak

T = TypeVar("T")

ROUNDING = 512
"""The allocator hands out multiples of so many bytes."""
PART_BYTES = 2**24
"""The least that keeps a GPU busy."""
MOST_PARTS = 16


class CudaStatistics:
    """Of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def handed_out(self) -> tuple[int, int] | None:
        counts = torch.cuda.memory_stats(self._device)
        return counts.get("requested_bytes.all.current", 0), counts.get("requested_bytes.all.allocated", 0)


class Cuda:
    """One GPU."""

    host = False
    cpu_kernels = False
    autocast_kind = "cuda"
    first_call_allocates = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.statistics = CudaStatistics(torch_device)

    @staticmethod
    def initialized() -> list[torch.device]:
        """All GPUs, once the process uses one; none before that."""
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] \
            if torch.cuda.is_initialized() else []

    def available(self) -> bool:
        return torch.cuda.is_available()

    def key(self) -> str:
        cudnn: Any = torch.backends.cudnn
        return (f"cuda {torch.cuda.get_device_name(self.torch_device)} {cudnn.version()} "
                f"{cudnn.benchmark} {cudnn.deterministic} {cudnn.allow_tf32}")

    def storage_bytes(self, size: int) -> int:
        return -(-size // ROUNDING) * ROUNDING

    def part_bytes(self, total: int) -> int:
        return max(PART_BYTES, total // MOST_PARTS)

    def memory(self) -> MemoryState:
        device = self.torch_device
        free, total = torch.cuda.mem_get_info(device)
        return MemoryState(free, total, torch.cuda.memory_reserved(device)
                           - torch.cuda.memory_allocated(device))

    def measure_peak(self, fn: Callable[[], T], *, timeline: bool = False) -> Peak[T]:
        def finished() -> T:
            result = fn()
            self.synchronize()
            return result

        def run() -> Peak[T]:
            if timeline:
                return events.measure_peak(finished, "cuda", self._index(), timeline=True)
            begin = time.perf_counter()
            result = finished()
            return Peak(0, 0, time.perf_counter() - begin, result)

        self.synchronize()
        return measured(self.statistics, run)

    def parts_meter(self) -> StatisticsMeter:
        return StatisticsMeter(self.statistics)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def generator(self) -> torch.Generator:
        torch.cuda.init()               # without it there are no generators
        return torch.cuda.default_generators[self._index()]

    def _index(self) -> int:
        index = self.torch_device.index
        return torch.cuda.current_device() if index is None else index
