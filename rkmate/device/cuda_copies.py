"""Copies between a GPU's memory and the host's.

Two streams beside the one that computes, one a direction, and events between the three: the host waits for
nothing. Host memory is pinned (else a copy would wait for the host), taken in slabs, once, and kept for the
next step.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rkmate.device.away_bytes import AwayBytes
from rkmate.device.copy_engine import StepCopies
from rkmate.device.forms import Form, bytes_of
from rkmate.device.lanes import checksum
from rkmate.device.room import Extent, Room
from rkmate.errors import OffloadError

SLAB = 2**25
"""Bytes of pinned memory that are taken at a time: a power of two, to which torch would round them."""
BLOCK = 512
"""Room in them is taken in multiples of this."""


class PinnedPool:
    """A device's pinned memory and streams; shared by all that send there. It is given back when nobody has
    it any more."""

    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)
        self.read: torch.cuda.Event | None = None
        """After it, room that was given back is read no more."""
        self._slabs: list[torch.Tensor] = []
        self.room = Room(BLOCK, functools.partial(_grow, self._slabs), step=SLAB)

    def parts(self, extents: Sequence[Extent], content: torch.Tensor
              ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a storage's bytes, each with its place in the host's memory."""
        done = 0
        for extent in extents:
            at, end = extent.offset, min(extent.size, len(content) - done) + extent.offset
            while at < end:
                size = min(end - at, SLAB - at % SLAB)
                slab = self._slabs[at // SLAB]
                yield content[done:done + size], slab[at % SLAB:at % SLAB + size]
                done += size
                at += size


def _grow(slabs: list[torch.Tensor], extent: Extent) -> None:
    slabs += [torch.empty(SLAB, dtype=torch.uint8, device="cpu", pin_memory=True)
              for _ in range(extent.size // SLAB)]


def pool_of(device: torch.device) -> PinnedPool:
    """The one of a device."""
    with _lock:
        found = _pools.get(device)
        if found is None:
            found = _pools[device] = PinnedPool(device)
        return found


_lock = threading.Lock()
_pools: weakref.WeakValueDictionary[torch.device, PinnedPool] = weakref.WeakValueDictionary()


class HostEngine:
    """Sends to the host's memory. Engines of one device share it."""

    buffer_bytes = 0
    place = "host"

    def __init__(self, device: torch.device, most_bytes: int | None = None, *, verify: bool = False) -> None:
        """`most_bytes`: of the storages that its calls have away at once. `verify`: what comes back must have
        the checksum of what went, for which the host waits."""
        self.most_bytes, self._verify = most_bytes, verify
        self._device = device
        self._pool: PinnedPool | None = pool_of(device)
        self._bytes = AwayBytes(self.place, most_bytes)

    def open(self, *, verify: bool = False) -> HostCopies:
        """See `CopyEngine.open`. Raises `OffloadError`: the engine is closed."""
        if self._pool is None:
            raise OffloadError("host: nothing more is sent there, it was closed")
        return HostCopies(self._device, self._pool, self._bytes, verify=verify or self._verify)

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool = None


class HostCopies:
    """The copies of one call. One thread at a time may use it, and all on one stream."""

    def __init__(self, device: torch.device, pool: PinnedPool, away: AwayBytes, *, verify: bool) -> None:
        self._device, self._pool, self._bytes, self._verify = device, pool, away, verify
        self.away_bytes = 0
        """Of the storages that it has sent, until it is closed."""
        self._away: dict[str, _Away] = {}
        self._leaving: dict[str, torch.Tensor] = {}
        self._coming: dict[str, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self._open = True

    def out(self, key: str, tensor: torch.Tensor) -> None:
        """See `StepCopies.out`."""
        pool = self._usable()
        if key in self._away:
            raise ValueError(f"{key} was sent away before")
        form, content = Form.of(tensor), bytes_of(tensor.untyped_storage())
        self._bytes.add(self, form.nbytes)
        try:
            extents = pool.room.take(form.nbytes)
        except RuntimeError as error:
            self.away_bytes -= form.nbytes
            raise OffloadError(f"host: there is no pinned memory for {form.nbytes:,} bytes "
                               f"({error})") from error
        expected = _checksum(content) if self._verify else None
        pool.out.wait_event(self._now().record_event())
        if (read := pool.read) is not None:
            pool.out.wait_event(read)
        self._leaving[key] = tensor
        with torch.cuda.stream(pool.out):
            for there, here in pool.parts(extents, content):
                here.copy_(there, non_blocking=True)
        self._away[key] = _Away(form, extents, pool.out.record_event(), expected)

    def leave(self, key: str) -> None:
        """See `StepCopies.leave`. The stream waits, not the host: memory is used again in its order."""
        self._usable()
        tensor = self._leaving[key]
        self._now().wait_event(self._away[key].written)
        del self._leaving[key], tensor

    def back(self, key: str) -> torch.Tensor:
        """See `StepCopies.back`."""
        pool = self._usable()
        if key in self._leaving:
            raise ValueError(f"{key} has not left")
        self.arrive(key)
        away = self._away[key]
        storage = torch.UntypedStorage(away.form.nbytes, device=self._device)
        tensor = away.form.over(storage)
        pool.back.wait_event(self._now().record_event())        # whoever had this memory before is done then
        pool.back.wait_event(away.written)
        with torch.cuda.stream(pool.back):
            for there, here in pool.parts(away.extents, bytes_of(storage)):
                there.copy_(here, non_blocking=True)
        self._coming[key] = tensor, pool.back.record_event()
        return tensor

    def arrive(self, key: str) -> None:
        """See `StepCopies.arrive`."""
        self._usable()
        if key not in self._coming:
            return
        tensor, there = self._coming[key]
        self._now().wait_event(there)
        away = self._away[key]
        if away.checksum is not None and _checksum(bytes_of(tensor.untyped_storage())) != away.checksum:
            raise OffloadError(f"host: of {away.form.nbytes:,} bytes some are not those that were sent: they "
                               "were written to while they were copied")
        del self._coming[key]

    def close(self) -> None:
        """See `StepCopies.close`. Memory that is still copied is used again when that is done, by whichever
        stream."""
        if not self._open:
            return
        self._open, self.away_bytes = False, 0
        for tensor in self._leaving.values():
            tensor.record_stream(self._pool.out)
        for tensor, _ in self._coming.values():
            tensor.record_stream(self._pool.back)
        extents = [extent for away in self._away.values() for extent in away.extents]
        self._leaving, self._coming, self._away = {}, {}, {}
        self._pool.read = self._pool.back.record_event()
        self._pool.room.give(extents)

    def __del__(self) -> None:
        if hasattr(self, "_open") and not sys.is_finalizing():
            self.close()

    def _now(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _usable(self) -> PinnedPool:
        if not self._open:
            raise OffloadError("host: these copies were closed")
        return self._pool


@dataclass(frozen=True)
class _Away:
    """What was sent."""

    form: Form
    extents: list[Extent]
    written: torch.cuda.Event
    """The end of the copy out."""
    checksum: int | None
    """None where nothing is verified."""


def _checksum(content: torch.Tensor) -> int:
    here = content.cpu()
    return checksum(here.data_ptr(), len(here))


def ends_by_events(call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                   compute: Callable[[], object]) -> tuple[float, float]:
    """See `Device.ends_of`: two streams wait, beside the one that computes."""
    start, ends = torch.cuda.Event(enable_timing=True), []
    start.record()
    begin()
    for wait, keys in ((call.leave, out), (call.arrive, back)):
        beside = torch.cuda.Stream()
        beside.wait_event(start)
        with torch.cuda.stream(beside):
            for key in keys:
                wait(key)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record(beside)
    while not all(end.query() for end in ends):
        compute()
        torch.cuda.current_stream().synchronize()
    return start.elapsed_time(ends[0]) / 1e3, start.elapsed_time(ends[1]) / 1e3
