"""Copies between a GPU's memory and the host's.

Each direction has a stream, in addition to the one that computes, and events order the three: the host waits
for nothing. Host memory is pinned (otherwise a copy would wait for the host), allocated once, in slabs, and
kept for the next step.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rkmate.errors import OffloadError
from rkmate.offload.copies import AwayBytes, CallCopies, Extent, Room, Sent, checksum
from rkmate.offload.protocol import StepCopies
from rkmate.torch_seam.tensors import Form, as_bytes

SLAB = 2**25
"""Bytes of pinned memory that are taken at a time: a power of two, to which torch would round them."""
BLOCK = 512
"""Room in them is taken in multiples of this."""


class PinnedPool:
    """A device's pinned memory and streams, shared by all that send there. The memory is freed when nothing
    refers to the pool any more."""

    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)
        self._slabs: list[torch.Tensor] = []
        self.room = Room(BLOCK, functools.partial(_grow, self._slabs), step=SLAB)
        self._read: deque[torch.cuda.Event] = deque()
        """Events after which returned room is not read any more; copies out do not wait for them yet."""
        self._waiting = threading.Lock()

    def give(self, extents: Sequence[Extent]) -> None:
        """Give room back that copies back may still read. It takes no lock: the collector of garbage may call
        it at any place."""
        self._read.append(self.back.record_event())
        self.room.give(extents)

    def wait_for_readers(self) -> None:
        """Let the copies out that begin from now on wait for all readers of the room that was given back."""
        with self._waiting:
            while self._read:
                self.out.wait_event(self._read[0])
                self._read.popleft()

    def parts(self, extents: Sequence[Extent], content: torch.Tensor
              ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return parts of a storage's bytes, each with its place in the host's memory."""
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
    """Return the pinned memory of a device; one pool for each device."""
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
        """`most_bytes`: limit of the storages that the engine's calls have away at once. `verify`: whether
        data that comes back must have its original checksum, for which the host waits."""
        self.most_bytes, self._verify = most_bytes, verify
        self._device = device
        self._pool: PinnedPool | None = pool_of(device)
        self._bytes = AwayBytes(self.place, most_bytes)

    def open(self, *, verify: bool = False) -> HostCopies:
        """See `CopyEngine.open`. Raises `OffloadError`: the engine is closed."""
        if self._pool is None:
            raise OffloadError("host: no data can be sent there any more: the engine was closed")
        return HostCopies(self._device, self._pool, self._bytes, verify=verify or self._verify)

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._pool = None


@dataclass(eq=False)
class _Pinned(Sent):
    """A storage, and where it is in pinned memory."""

    extents: list[Extent]
    written: torch.cuda.Event = field(init=False)
    """The end of the copy out."""
    there: torch.cuda.Event = field(init=False)
    """The end of the last copy back."""
    checksum: int | None = None
    """Checksum of the sent bytes; None if copies are not verified."""


class HostCopies(CallCopies[_Pinned]):
    """The copies of one call. They wait for each other on one stream, not on the host: memory is reused in
    the stream's order."""

    room = "pinned memory"

    def __init__(self, device: torch.device, pool: PinnedPool, away: AwayBytes, *, verify: bool) -> None:
        self._pool, self._verify = pool, verify
        super().__init__(HostEngine.place, device, away)

    def _take(self, form: Form, tensor: torch.Tensor) -> _Pinned:
        return _Pinned(form, tensor, self._pool.room.take(form.nbytes))

    def _send(self, sent: _Pinned, content: torch.UntypedStorage) -> None:
        pool, there = self._pool, as_bytes(content)
        if self._verify:
            sent.checksum = _checksum(there)
        pool.wait_for_readers()
        pool.out.wait_event(self._now().record_event())
        with torch.cuda.stream(pool.out):
            for part, here in pool.parts(sent.extents, there):
                here.copy_(part, non_blocking=True)
        sent.written = pool.out.record_event()

    def _wait_out(self, sent: _Pinned) -> None:
        self._now().wait_event(sent.written)

    def _fetch(self, sent: _Pinned, content: torch.UntypedStorage) -> None:
        pool = self._pool
        pool.back.wait_event(self._now().record_event())        # whoever had this memory before is done then
        pool.back.wait_event(sent.written)
        with torch.cuda.stream(pool.back):
            for part, here in pool.parts(sent.extents, as_bytes(content)):
                part.copy_(here, non_blocking=True)
        sent.there = pool.back.record_event()

    def _wait_back(self, sent: _Pinned) -> None:
        self._now().wait_event(sent.there)
        if sent.checksum is not None and sent.coming is not None \
                and _checksum(as_bytes(sent.coming.untyped_storage())) != sent.checksum:
            raise OffloadError(f"host: some of {sent.form.nbytes:,} bytes differ from those that were sent: "
                               "they were written to while they were copied")

    def _give_up(self) -> None:
        # Memory that is still copied is used again when that is done, by whichever stream.
        for sent in self._away.values():
            if sent.leaving is not None:
                sent.leaving.record_stream(self._pool.out)
            if sent.coming is not None:
                sent.coming.record_stream(self._pool.back)
        extents = [extent for sent in self._away.values() for extent in sent.extents]
        self._forget()
        if extents:
            self._pool.give(extents)

    def _now(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


def _checksum(content: torch.Tensor) -> int:
    here = content.cpu()
    return checksum(here.data_ptr(), len(here))


def ends_by_events(call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                   compute: Callable[[], object]) -> tuple[float, float]:
    """See `Device.ends_of`: two more streams wait, in addition to the one that computes."""
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
