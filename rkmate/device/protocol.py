"""What the package must know of a place to compute. Sizes are bytes, times are seconds.

A new kind of device is a class with these members and a line in `rkmate.device.registry`; nothing
else asks what kind a device is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from rkmate.device.copy_engine import CopyEngine, StepCopies
from rkmate.devices import GPU, Rates
from rkmate.errors import RkmateError
from rkmate.ir.allocator import CachingAllocator
from rkmate.ir.peak import Peak

T = TypeVar("T")


class MeterError(RkmateError, RuntimeError):
    """Memory cannot be measured now: another profiler or measurement is running."""


@dataclass(frozen=True)
class MemoryState:
    """A device's memory at one moment, in bytes."""

    free: int
    """Nobody has it: no process, and no allocator."""
    total: int
    """Of the whole device."""
    cached: int
    """Held by torch's allocator and given to no tensor: free for tensors."""


class Statistics(Protocol):
    """What an allocator tells of the bytes that tensors have."""

    def allocated(self) -> int:
        """Alive now."""

    def peak(self) -> int:
        """Most alive at once since the last reset, whoever asked for it: the statistics are the
        user's, too, and so nobody resets it."""

    def handed_out(self) -> tuple[int, int] | None:
        """Return bytes that were asked for: those that are alive, and all that ever were; None where that is
        not counted."""


class PartsMeter(Protocol):
    """The peak of each of several parts of one run, at the price of one measurement."""

    def running(self) -> AbstractContextManager[object]:
        """Return the run that the parts belong to. Raises `MeterError` when a profiler is in the way."""

    def part(self, number: int) -> AbstractContextManager[object]:
        """One part; its number must be its own, and parts cannot overlap."""

    def peaks(self) -> dict[int, int]:
        """Return part -> most bytes over the level at its start. After the run."""


class Device(Protocol):
    """A place to compute."""

    @property
    def torch_device(self) -> torch.device:
        """Its name in torch."""

    @property
    def host(self) -> bool:
        """Whether it is the CPU that Python runs on: calls return when they are done, and all of its
        memory is the process's."""

    @property
    def cpu_kernels(self) -> bool:
        """Whether torch's CPU kernels compute here: their layouts, roundings and fused cells apply."""

    @property
    def autocast_kind(self) -> str:
        """What `torch.autocast` calls it."""

    def available(self) -> bool:
        """Return whether this machine has it."""

    def key(self) -> str:
        """What times on it depend on beside the operation: the hardware's name, its libraries and
        their settings. Part of the keys of remembered costs."""

    @property
    def rates(self) -> Rates:
        """How fast it computes, about: for costs that are not measured."""

    @property
    def elsewhere(self) -> GPU | None:
        """The GPU that this one stands for in a plan, and that is not here; None for one that is."""

    # -- memory -------------------------------------------------------------------------------

    def storage_bytes(self, size: int) -> int:
        """What the allocator hands out for a storage of `size` bytes."""

    def part_bytes(self, total: int) -> int:
        """About how much of a tensor of `total` bytes a chunked kernel should work on at a time."""

    @property
    def statistics(self) -> Statistics | None:
        """What the allocator counts; None for one that counts nothing."""

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
        """How long a call's work takes on the device, from its start to its end; and its result."""

    @property
    def cache_bytes(self) -> int:
        """Of the caches that a timed call finds filled by the one before; 0 where that is left so."""

    def synchronize(self) -> None:
        """Wait until all that was asked of the device is done."""

    # -- randomness ---------------------------------------------------------------------------

    def generator(self) -> torch.Generator:
        """Return the default generator, which random operations on the device draw from."""

    # -- copies -------------------------------------------------------------------------------

    def copy_engine(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> CopyEngine:
        """What sends data away from the device: to ``"host"``, or to a folder. `most_bytes`: that may be
        there at once. `verify`: what comes back must have the checksum of what went. Raises `ArgumentError`:
        from here nothing can be sent there."""

    def ends_of(self, call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                compute: Callable[[], object]) -> tuple[float, float]:
        """Return seconds to the end of copies out and of copies back, which `begin` begins in a call;
        meanwhile `compute` is called again and again."""
