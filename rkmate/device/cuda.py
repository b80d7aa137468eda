"""CUDA devices (and AMD's, which torch calls so, too). The caching allocator keeps statistics."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from rkmate.device import history
from rkmate.device.protocol import MemoryState
from rkmate.devices import A100, GPU, Rates, called
from rkmate.errors import ArgumentError
from rkmate.ir.allocator import ROUNDING, CachingAllocator, Segment, SegmentPart
from rkmate.ir.simulate import Peak
from rkmate.offload import cuda as cuda_copies
from rkmate.offload.protocol import CopyEngine, StepCopies
from rkmate.torch_seam import memory

T = TypeVar("T")

PART_BYTES = 2**24
"""The least that keeps a GPU busy."""
MOST_PARTS = 16
SHORT = 1e-5
"""Seconds: of what takes less, several runs are timed together, as an event takes a few millionths itself."""
RUNS_OF_SHORT = 10
QUEUE_CYCLES = 400_000
"""About 0.2 ms: so long the device is kept busy before a timed call, which it then finds in its queue. An
idle one would wait for each launch."""


WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
"""Environment variables for the bytes that products take in addition: from torch 2.15 on in each call."""


@functools.lru_cache
def _rates_of(name: str) -> Rates:
    """Return the rates of the GPU with this name; those of an A100 for unknown names."""
    return (called(name) or A100).expected


class CudaStatistics:
    """Statistics of the caching allocator: bytes that were requested, without those that it keeps in
    addition."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return self._now("current")

    def peak(self) -> int:
        return self._now("peak")

    def _now(self, which: str) -> int:
        return int(torch.cuda.memory_stats(self._device).get(f"requested_bytes.all.{which}", 0))

    def handed_out(self) -> tuple[int, int] | None:
        counts = torch.cuda.memory_stats(self._device)
        return counts.get("requested_bytes.all.current", 0), counts.get("requested_bytes.all.allocated", 0)


class Cuda:
    """A GPU."""

    host = False
    cpu_kernels = False
    autocast_kind = "cuda"
    first_call_allocates = True
    cache_bytes = 0
    elsewhere: GPU | None = None

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.statistics = CudaStatistics(torch_device)

    @staticmethod
    def initialized() -> list[torch.device]:
        """Return all GPUs, once the process uses one; none before that."""
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] \
            if torch.cuda.is_initialized() else []

    @staticmethod
    def present() -> dict[torch.device, str]:
        """Return all GPUs that torch sees, with the names of their hardware."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {torch.device("cuda", i): torch.cuda.get_device_name(i) for i in range(count)}

    @property
    def rates(self) -> Rates:
        return _rates_of(torch.cuda.get_device_name(self.torch_device))

    def available(self) -> bool:
        return torch.cuda.is_available()

    def key(self) -> str:
        cudnn: Any = torch.backends.cudnn
        products: Any = torch.backends.cuda.matmul
        return (f"cuda {torch.cuda.get_device_name(self.torch_device)} {cudnn.version()} "
                f"{cudnn.benchmark} {cudnn.deterministic} {products.fp32_precision} "
                f"{cudnn.conv.fp32_precision} {cudnn.rnn.fp32_precision} "
                f"{products.allow_bf16_reduced_precision_reduction} "
                f"{products.allow_fp16_reduced_precision_reduction} {products.allow_fp16_accumulation} "
                f"{cudnn.enabled} {torch.backends.cuda.preferred_blas_library()} "
                f"{[os.environ.get(name) for name in WORKSPACES]}")

    def storage_bytes(self, size: int) -> int:
        return -(-size // ROUNDING) * ROUNDING

    def part_bytes(self, total: int) -> int:
        return max(PART_BYTES, total // MOST_PARTS)

    def memory(self) -> MemoryState:
        device = self.torch_device
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        # What `torch.cuda.set_per_process_memory_fraction` allows.
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return MemoryState(max(0, min(free, allowed - reserved)), min(total, allowed),
                           reserved - torch.cuda.memory_allocated(device))

    def allocator(self) -> CachingAllocator:
        snapshot = memory.allocator_snapshot()
        index = self._index()
        stream = torch.cuda.current_stream(index).cuda_stream
        return CachingAllocator(
            expandable=snapshot["allocator_settings"]["expandable_segments"],
            segments=(_segment(s, stream) for s in snapshot["segments"] if s["device"] == index))

    def give_back(self) -> None:
        with torch.cuda.device(self._index()):
            torch.cuda.empty_cache()

    def measure_peak(self, fn: Callable[[], T], *, timeline: bool = False) -> Peak[T]:
        def finished() -> T:
            result = fn()
            self.synchronize()
            return result

        self.synchronize()
        return history.measure_peak(finished, self._index(), self.storage_bytes, timeline=timeline)

    def parts_meter(self) -> history.HistoryMeter:
        return history.HistoryMeter(self._index(), self.storage_bytes, self.statistics.allocated)

    def warm_up(self) -> None:
        if torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            return                  # such a product would be refused, and the model has none
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            two = torch.ones(2, 2, device=self.torch_device, requires_grad=True)
            product = torch.addmm(two[0], two, two)             # by cuBLASLt, its gradients by cuBLAS
            # The backward's thread has workspaces of its own, and computes both kinds of products, too.
            product.register_hook(lambda grad: torch.addmm(grad[0], grad, grad))
            # It begins with a kernel of torch: cuBLAS warns if its call is a thread's first.
            torch.autograd.grad(product.sigmoid().sum(), two)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        seconds, result = self._between_events(call, 1)
        if seconds < SHORT:
            del result              # freed before the calls, as its memory may serve again
            seconds, result = self._between_events(call, RUNS_OF_SHORT)
        return seconds, result

    def _between_events(self, call: Callable[[], T], runs: int) -> tuple[float, T]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._index()):
            memory.keep_busy(QUEUE_CYCLES)
            start.record()
            for _ in range(runs - 1):
                call()
            result = call()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / runs, result

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def generator(self) -> torch.Generator:
        torch.cuda.init()               # without it there are no generators
        return torch.cuda.default_generators[self._index()]

    def copy_engine(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> CopyEngine:
        if place != "host":
            raise ArgumentError(f"offload is {place!r}, and from a GPU data is sent to the host's memory: "
                                'offload="host"')
        return cuda_copies.HostEngine(torch.device("cuda", self._index()), most_bytes, verify=verify)

    def ends_of(self, call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                compute: Callable[[], object]) -> tuple[float, float]:
        with torch.cuda.device(self._index()):
            return cuda_copies.ends_by_events(call, begin, out, back, compute)

    def _index(self) -> int:
        index = self.torch_device.index
        return torch.cuda.current_device() if index is None else index


def _segment(told: Any, stream: int) -> Segment:
    """Return a segment from the allocator's own snapshot. A stream gets nothing of the segments of other
    streams, or of recordings: these have one block, which is not free."""
    small = told["segment_type"] == "small"
    if told["stream"] != stream or tuple(told["segment_pool_id"]) != (0, 0):
        return Segment(small, (SegmentPart(told["total_size"], False),))
    return Segment(small, tuple(SegmentPart(b["size"], b["state"] == "inactive") for b in told["blocks"]))
