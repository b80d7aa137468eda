"""The protocol of devices. Sizes are bytes, times are seconds.

A new kind of device is a class with these members and a line in `rkmate.device.registry`; nothing
else asks what kind a device is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from rkmate.devices import GPU, Rates
from rkmate.errors import RkmateError
from rkmate.ir.allocator import CachingAllocator
from rkmate.ir.simulate import Peak
from rkmate.offload.protocol import CopyEngine, StepCopies

T = TypeVar("T")


class MeterError(RkmateError, RuntimeError):
    """Memory cannot be measured now: another profiler or measurement is running."""


class MeterInUse(MeterError):
    """rkmate measures something else."""

    def __init__(self) -> None:
        super().__init__("memory is being measured already: measurements cannot be nested, and one thread at "
                         "a time can measure")


@dataclass(frozen=True)
class MemoryState:
    """A device's memory at one moment, in bytes."""

    free: int
    """Nobody has it, no process and no allocator, and this process may take it."""
    total: int
    """Bytes of the device, as many as this process may take."""
    cached: int
    """Held by torch's allocator and given to no tensor: free for tensors."""


class Statistics(Protocol):
    """Statistics of an allocator: bytes of tensors."""

    def allocated(self) -> int:
        """Return the bytes alive now."""

    def peak(self) -> int:
        """Return the most bytes alive at once since the last reset, whoever reset it. The statistics belong
        to the user, too, so nobody resets them here."""

    def handed_out(self) -> tuple[int, int] | None:
        """Return bytes that were asked for: those that are alive, and all that ever were; None where that is
        not counted."""


class PartsMeter(Protocol):
    """The peak of each of several parts of one run, at the price of one measurement."""

    of_one_thread: bool
    """Whether the thread that begins a run has to measure all of its parts, and to end it."""

    def running(self) -> AbstractContextManager[object]:
        """Return the run that the parts belong to. Raises `MeterError` when a profiler is in the way."""

    def paused(self) -> AbstractContextManager[object]:
        """Let something else be measured inside the context, in the middle of the run and between its parts.
        Bytes that it leaves in memory count."""

    def part(self, number: int) -> AbstractContextManager[object]:
        """Measure one part of the run inside the context. Each part has its own number; parts cannot
        overlap."""

    def levels(self) -> dict[int, tuple[int, int]]:
        """Return, after the run, the bytes at the start of each part, and the most bytes in it, both over the
        level at the start of the run."""
        ...

    def peaks(self) -> dict[int, int]:
        """Return, after the run, the most bytes over the level at its start, for each part."""
        return peaks_over(self.levels())


def peaks_over(levels: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the most bytes of each part over the level at its start, from both (`PartsMeter.levels`)."""
    return {number: peak - before for number, (before, peak) in levels.items()}


class Device(Protocol):
    """A place to compute."""

    @property
    def torch_device(self) -> torch.device:
        """Torch's name of the device."""

    @property
    def host(self) -> bool:
        """Whether it is the CPU that Python runs on: calls return when they are done, and all of its
        memory is the process's."""

    @property
    def cpu_kernels(self) -> bool:
        """Whether torch's CPU kernels compute here: their layouts, roundings and fused cells apply."""

    @property
    def autocast_kind(self) -> str:
        """Name of the device for `torch.autocast`."""

    def available(self) -> bool:
        """Return whether this machine has the device."""

    def key(self) -> str:
        """Return a text for everything that times on the device depend on, except the operation: the
        hardware's name, its libraries and their settings. Part of the keys of remembered costs."""

    @property
    def rates(self) -> Rates:
        """How fast it computes, about: for costs that are not measured."""

    @property
    def elsewhere(self) -> GPU | None:
        """The GPU that this one stands for in a plan, and that is not here; None for one that is."""

    # -- memory -------------------------------------------------------------------------------

    def storage_bytes(self, size: int) -> int:
        """Return the bytes that the allocator hands out for a storage of `size` bytes."""

    def part_bytes(self, total: int) -> int:
        """Return about how many bytes of a tensor of `total` bytes a chunked kernel should work on at a
        time."""

    @property
    def statistics(self) -> Statistics | None:
        """Statistics of the allocator; None for an allocator that counts nothing."""

    def memory(self) -> MemoryState | None:
        """Return the device's memory now; None where that says nothing about what can be allocated."""

    def allocator(self) -> CachingAllocator | None:
        """Return a model of the allocator as it stands now; None for one that keeps nothing for itself."""

    def give_back(self) -> None:
        """Give the device back what the allocator keeps and no tensor has."""

    def warm_up(self) -> None:
        """Let libraries take the memory that they keep, in this thread and in autograd's: it is no step's."""

    def measure_peak(self, fn: Callable[[], T], *, timeline: bool = False) -> Peak[T]:
        """Call `fn` and measure what it allocates; with `timeline`, the level after each event, too.
        Raises `MeterError` when a profiler is in the way."""

    def parts_meter(self) -> PartsMeter:
        """Return a meter for several parts of one run."""

    @property
    def first_call_allocates(self) -> bool:
        """Whether libraries take memory at an operation's first call, and keep it."""

    # -- time and order -----------------------------------------------------------------------

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Return the seconds of a call's work on the device, from its start to its end, and the call's
        result."""

    @property
    def cache_bytes(self) -> int:
        """Size of the caches, in bytes; 0 where they are not flushed before a timed run."""

    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""

    # -- randomness ---------------------------------------------------------------------------

    def generator(self) -> torch.Generator:
        """Return the default generator, which random operations on the device draw from."""

    # -- copies -------------------------------------------------------------------------------

    def copy_engine(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> CopyEngine:
        """Make an engine that sends data away from the device: to ``"host"``, or to a folder. `most_bytes`:
        that may be away at once. `verify`: whether data that comes back must have its original checksum.
        Raises `ArgumentError` if the device cannot send data there."""

    def ends_of(self, call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                compute: Callable[[], object]) -> tuple[float, float]:
        """Return seconds to the end of copies out and of copies back, which `begin` begins in a call;
        meanwhile `compute` is called again and again."""


class PeakWatch:
    """The peak from now on, read without a reset: an allocator has one peak, which belongs to the user.

    If that peak rises (or the user resets it), the largest level since now is known. Otherwise it is at
    most the earlier peak, and only the levels that were seen are known to have been reached.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self.start = statistics.allocated()
        """Bytes alive when the watch began."""
        self._before = statistics.peak()

    def peak(self) -> int:
        """Return bytes alive at once since the watch began: the most that are known."""
        now = self._statistics.peak()
        return now if now != self._before else max(self.start, self._statistics.allocated())
