"""Copies of a call's data out of a device's memory and back, on separate threads: the bytes that are away,
room for them, lanes, and the order of a call's copies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import threading
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from rkmate.errors import OffloadError
from rkmate.torch_seam.tensors import Form

# -- Bytes that are away ---------------------------------------------------------------------------
#
# How much the calls of an engine have away, and how much they may.


class Call(Protocol):
    """A call that sends data."""

    away_bytes: int
    """Bytes of the storages that the call has sent, until it is closed."""


class AwayBytes:
    """Counts the bytes that all open calls of one engine have away."""

    def __init__(self, place: str, most_bytes: int | None) -> None:
        self._place, self._most = place, most_bytes
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._counting = threading.Lock()

    def add(self, call: Call, size: int) -> None:
        """Count `size` more bytes for a call. Raises `OffloadError` if more bytes would be away than
        allowed."""
        with self._counting:
            self._calls.add(call)
            away = sum(c.away_bytes for c in self._calls) + size
            if self._most is not None and away > self._most:
                raise OffloadError(f"{self._place}: {size:,} more bytes would make {away:,} bytes there, "
                                   f"and the limit is {self._most:,} (most_bytes): raise the limit, or plan "
                                   "for all calls before a backward (calls=)")
            call.away_bytes += size


# -- Room ------------------------------------------------------------------------------------------
#
# Which bytes of a growing space are taken, and by whom they can be taken next.


PIECE = 2**18
"""Bytes: room that is not in one piece is made of pieces that are no smaller."""


class Extent(NamedTuple):
    """A run of bytes."""

    offset: int
    size: int


class Room:
    """A space that grows if its free part is too small. All sizes are multiples of a block of bytes."""

    def __init__(self, block: int, grow: Callable[[Extent], None], *, step: int = 1) -> None:
        """`grow`: makes the space longer by an extent, in multiples of `step` bytes. If `grow` raises, `take`
        raises the same error, and nothing is taken."""
        self.block = block
        self.end = 0
        """Length of the space, in bytes."""
        self._grow, self._step = grow, step
        self._free: list[Extent] = []
        self._given: deque[Extent] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> list[Extent]:
        """Return room for `size` bytes: one extent if possible, else several."""
        need = -(-size // self.block) * self.block
        if not need:
            return []
        with self._lock:
            self._merge()
            for k, extent in enumerate(self._free):
                if extent.size >= need:
                    self._free[k:k + 1] = _after(extent, need)
                    return [Extent(extent.offset, need)]
            taken, left = [], []
            for extent in self._free:
                some = min(need, extent.size)
                if not need or some < min(PIECE, need):
                    left.append(extent)
                    continue
                taken.append(Extent(extent.offset, some))
                left.extend(_after(extent, some))
                need -= some
            if need:
                at_end = left and left[-1].offset + left[-1].size == self.end
                last = left.pop() if at_end else Extent(self.end, 0)
                more = Extent(self.end, -(-(need - last.size) // self._step) * self._step)
                self._grow(more)
                taken.append(Extent(last.offset, need))
                left.extend(_after(Extent(last.offset, last.size + more.size), need))
                self.end += more.size
            self._free = left
            return taken

    def give(self, extents: Iterable[Extent]) -> None:
        """Give room back. It takes no lock: the collector of garbage may call it at any place."""
        self._given.extend(extents)

    def _merge(self) -> None:
        if self._given:
            given = [self._given.popleft() for _ in range(len(self._given))]
            self._free = list(_merged(sorted([*self._free, *given])))


def _after(extent: Extent, size: int) -> list[Extent]:
    """Return the rest of an extent after its first bytes were taken."""
    return [Extent(extent.offset + size, extent.size - size)] if extent.size > size else []


def _merged(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Yield extents with neighbours merged. `extents` come in order."""
    last: Extent | None = None
    for extent in extents:
        if last is not None and last.offset + last.size == extent.offset:
            last = Extent(last.offset, last.size + extent.size)
        else:
            if last is not None:
                yield last
            last = extent
    if last is not None:
        yield last


# -- Lanes -----------------------------------------------------------------------------------------
#
# Threads that move bytes between memory and a file.
#
# Each direction has a queue of chunks and two threads: while one waits for the disk, the other copies
# memory. They call nothing of torch (its kernels would start threads of their own here), and what they call
# leaves the interpreter to the others. They know addresses: who starts a transfer keeps the memory until it
# is over, so that memory is never freed in these threads.


LANES = 2
"""Threads of a direction."""
BLOCK = 4096
"""Direct reads and writes are in multiples of this number of bytes, in the file and in memory."""
CHUNK = 2**20
"""Bytes that are moved at a time, at most, and of a thread's buffer."""
_LOOK_SECONDS = 2e-4
"""Between looks at a thread that is to be done with a chunk."""


class Transfer:
    """A copy of one storage, one way, in chunks."""

    def __init__(self, chunks: int, buffers: tuple[int, ...]) -> None:
        """`buffers`: addresses of the lanes' buffers."""
        self.buffers = buffers
        self.given_up = False
        """Set when the transfer is not needed any more: chunks that no lane has begun are left out."""
        self.error: BaseException | None = None
        """The first that occurred; before the end of the transfer it means nothing."""
        self.over = threading.Event()
        """Set when all chunks were moved or left out."""
        self._left = chunks
        self._lock = threading.Lock()
        if not chunks:
            self.over.set()

    def count(self, error: BaseException | None) -> None:
        """Count a chunk as done; the last one ends the transfer."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left:
                return
        self.over.set()


@dataclass(frozen=True)
class Chunk:
    """A part of a transfer."""

    transfer: Transfer
    address: int
    """Address in memory."""
    size: int
    offset: int
    """Offset in the file."""
    checksum: int | None = None
    """Checksum that the chunk's bytes should have when they are back."""


class Mismatch(Exception):
    """Data came back with another checksum."""


class Descriptor:
    """An open file. It is closed at the latest when no thread uses it any more."""

    def __init__(self, number: int, *, direct: bool) -> None:
        self.number = number
        self.direct = direct
        """Whether reads and writes pass by the system's cache of pages."""
        self.aligned = BLOCK if direct else 1
        """Whole blocks of memory at multiples of it are read and written as they stand; what is elsewhere is
        copied to a buffer, or from one."""

    def close(self) -> None:
        """Close it, once."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    __del__ = close

    def write(self, chunk: Chunk, lane: int) -> None:
        """Copy a chunk from memory to the file."""
        buffer = self._buffer(chunk, lane)
        if buffer:
            ctypes.memmove(buffer, chunk.address, chunk.size)
        view, done = memory(buffer or chunk.address, -(-chunk.size // BLOCK) * BLOCK), 0
        while done < chunk.size:
            some = os.pwrite(self.number, view[done:], chunk.offset + done)
            done = _advanced(done, some, chunk.size, "written")
        if not self.direct:
            os.fdatasync(self.number)
            self._forget(chunk)

    def read(self, chunk: Chunk, lane: int) -> None:
        """Copy a chunk from the file to memory."""
        buffer = self._buffer(chunk, lane)
        view, done = memory(buffer or chunk.address, -(-chunk.size // BLOCK) * BLOCK), 0
        while done < chunk.size:
            some = os.preadv(self.number, [view[done:]], chunk.offset + done)
            done = _advanced(done, some, chunk.size, "read")
        if buffer:
            ctypes.memmove(chunk.address, buffer, chunk.size)
        if not self.direct:
            self._forget(chunk)
        if chunk.checksum is not None and checksum(chunk.address, chunk.size) != chunk.checksum:
            raise Mismatch

    def _buffer(self, chunk: Chunk, lane: int) -> int:
        """Return the address of the buffer that a chunk takes its way over; 0 for none."""
        return chunk.transfer.buffers[lane] if chunk.address % self.aligned or chunk.size % BLOCK else 0

    def _forget(self, chunk: Chunk) -> None:
        """Tell the system that it need not keep the pages."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, chunk.offset, chunk.size, os.POSIX_FADV_DONTNEED)


def _advanced(done: int, some: int, size: int, what: str) -> int:
    """Return the number of bytes done after another call, in whole blocks unless the chunk is complete.
    Raises `OSError` if the call made no progress, as at the end of the file."""
    if done + some >= size:
        return size
    if some < BLOCK:
        raise OSError(errno.EIO, f"only {some:,} bytes of {size - done:,} could be {what}")
    return (done + some) // BLOCK * BLOCK


def memory(address: int, size: int) -> memoryview:
    """Return memory at an address, which it does not keep."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def checksum(address: int, size: int) -> int:
    """Return the checksum of bytes in memory."""
    return zlib.crc32(memory(address, size))


def let_go(lock: threading.RLock) -> None:
    """Release a lock as often as this thread has acquired it."""
    with contextlib.suppress(RuntimeError):         # it is not this thread's
        while True:
            lock.release()


def uninterrupted(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that repeats a call until no Ctrl-C interrupts it. For calls around a fork or in the
    garbage collector, where Python drops exceptions: a call that is half done is worse than a lost Ctrl-C."""
    def run() -> None:
        while True:
            try:
                return call()
            except KeyboardInterrupt:
                continue
    return run


Queue = SimpleQueue["Chunk | None"]


class Lanes:
    """The threads of one file. The file's owner calls `stop`."""

    def __init__(self, descriptor: Descriptor, keep: object) -> None:
        """`keep`: an object that has to live as long as the threads do."""
        self.out: Queue = SimpleQueue()
        self.back: Queue = SimpleQueue()
        self._descriptor, self._keep = descriptor, keep
        self._lanes = [Lane(k % LANES, self.back if k >= LANES else self.out,
                            descriptor.read if k >= LANES else descriptor.write) for k in range(2 * LANES)]
        self._giving = threading.Lock()
        """Held while chunks are given: none comes after the end of a queue, where nobody would move it."""
        self._stopped = False

    def put(self, queue: Queue, chunks: Iterable[Chunk]) -> None:
        """Give chunks to the threads of a direction, and start these, where they do not run. Raises
        `RuntimeError`: not after `stop`, nor where the system has no thread."""
        with self._giving:
            if self._stopped:
                raise RuntimeError("the threads that copy have ended, as the process does")
            for lane in self._lanes:
                if not lane.started:
                    # Known before it runs: it runs on where the wait for its start is interrupted.
                    lane.thread = threading.Thread(target=lane.work, args=(self._keep,),
                                                   name="rkmate copies", daemon=True)
                    lane.thread.start()
            for chunk in chunks:
                queue.put(chunk)

    def here(self) -> bool:
        """Return whether the current thread is one of the lanes' threads."""
        return threading.current_thread() in [lane.thread for lane in self._lanes]

    def stop(self) -> None:
        """End the threads; the file is closed then. Nobody waits for what they were given."""
        with self._giving:
            self._stopped = True
            for lane in self._lanes:
                lane.stopped = True
                lane.queue.put(None)
        if not self.here():
            for lane in self._lanes:
                if lane.thread is not None and lane.started:
                    lane.thread.join()
            self._descriptor.close()

    def without(self, transfers: Collection[Transfer]) -> None:
        """Give transfers up; return when no thread works on them, and none will. It takes no lock: the
        collector of garbage may call it at any place, but in these threads."""
        for transfer in transfers:
            transfer.given_up = True
        for lane in self._lanes:
            while lane.transfer in transfers:
                time.sleep(_LOOK_SECONDS)

    def rest(self) -> None:
        """Wait until no thread reads or writes; none does before `resume`."""
        for lane in self._lanes:
            lane.working.acquire()

    def resume(self) -> None:
        """Undo `rest`, in the same thread; also a `rest` that was interrupted or done twice."""
        for lane in self._lanes:
            let_go(lane.working)


class Lane:
    """A thread, and its current work."""

    def __init__(self, number: int, queue: Queue, move: Callable[[Chunk, int], None]) -> None:
        self.queue = queue
        self.thread: threading.Thread | None = None
        self.transfer: Transfer | None = None
        """The transfer whose chunk the lane is moving."""
        self.working = threading.RLock()
        """Held while it moves a chunk. It knows who holds it: nobody lets go of it for another."""
        self.stopped = False
        """Whether the lane should move no more chunks."""
        self._number, self._move = number, move

    @property
    def started(self) -> bool:
        """Whether the lane has a thread that runs, or has run."""
        return self.thread is not None and self.thread.ident is not None

    def work(self, _keep: object) -> None:
        """Run the thread: move chunks until the queue ends."""
        while (chunk := self.queue.get()) is not None:
            error: BaseException | None = None
            with self.working:
                self.transfer = transfer = chunk.transfer       # first this, and then the question
                if self.stopped:
                    error = OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                elif not transfer.given_up and transfer.error is None:
                    try:
                        self._move(chunk, self._number)
                    except BaseException as caught:
                        error = caught.with_traceback(None)     # it would keep what the frames have
                self.transfer = None
            transfer.count(error)
            del chunk, transfer


# -- Copies of a call ------------------------------------------------------------------------------
#
# What the copies of a call are in every engine: their order, what is away, and their end.


@dataclass(eq=False)
class Sent:
    """A storage that a call has sent."""

    form: Form
    leaving: torch.Tensor | None
    """Tensor that is being copied away; None when it has left."""
    coming: torch.Tensor | None = field(default=None, init=False)
    """Tensor that the data is copied back to, until the copy has ended."""
    begun: bool = field(default=False, init=False)
    """Whether all of the last copy, out or back, was asked for: else that was interrupted."""


S = TypeVar("S", bound=Sent)


class CallCopies(ABC, Generic[S]):
    """The copies of one call; see `StepCopies`. One thread at a time may use them, any thread may close
    them."""

    room = "room"
    """The kind of room that `_take` takes, in words."""

    def __init__(self, place: str, device: torch.device, away: AwayBytes) -> None:
        """`away`: counts the bytes that all calls of the engine have away."""
        self._place, self._device, self._bytes = place, device, away
        self._process = os.getpid()
        self._closing = threading.RLock()       # of this thread: an interrupted close can be done again
        self.away_bytes = 0
        """Bytes of the storages that the call has sent, until it is closed."""
        self._away: dict[str, S] = {}
        self._open = True

    # -- what an engine does -----------------------------------------------------------------

    @abstractmethod
    def _take(self, form: Form, tensor: torch.Tensor) -> S:
        """Take room for a storage. Raises `OSError` or `RuntimeError` if there is none."""

    @abstractmethod
    def _send(self, sent: S, content: torch.UntypedStorage) -> None:
        """Begin to copy it away."""

    @abstractmethod
    def _wait_out(self, sent: S) -> None:
        """Wait for the end of that."""

    @abstractmethod
    def _fetch(self, sent: S, content: torch.UntypedStorage) -> None:
        """Begin to copy it back."""

    @abstractmethod
    def _wait_back(self, sent: S) -> None:
        """Wait for the end of that."""

    @abstractmethod
    def _give_up(self) -> None:
        """Wait for, or give up, what is under way; `_forget`, and then give room back: who is interrupted
        between loses room, and gives none twice."""

    # -- what all do -------------------------------------------------------------------------

    def out(self, key: str, tensor: torch.Tensor) -> None:
        """See `StepCopies.out`."""
        self._check_open()
        if key in self._away:
            raise ValueError(f"{key} was already sent away")
        form = Form.of(tensor)
        self._bytes.add(self, form.nbytes)
        try:
            sent = self._take(form, tensor)
        except (OSError, RuntimeError) as error:
            self.away_bytes -= form.nbytes
            raise self._error(f"there is no {self.room} for {form.nbytes:,} bytes", error) from error
        self._away[key] = sent          # before all else: what is known here is given back at the end
        self._send(sent, tensor.untyped_storage())
        sent.begun = True

    def leave(self, key: str) -> None:
        """See `StepCopies.leave`."""
        self._check_open()
        sent = self._away[key]
        if sent.leaving is None:
            raise ValueError(f"{key} was already freed after its copy-out")
        self._check_begun(sent)
        self._wait_out(sent)
        sent.leaving = None

    def back(self, key: str) -> torch.Tensor:
        """See `StepCopies.back`."""
        self._check_open()
        sent = self._away[key]
        if sent.leaving is not None:
            raise ValueError(f"{key} has not left")
        self.arrive(key)
        storage = torch.UntypedStorage(sent.form.nbytes, device=self._device)
        sent.begun, sent.coming = False, (tensor := sent.form.over(storage))
        self._fetch(sent, storage)
        sent.begun = True
        return tensor

    def arrive(self, key: str) -> None:
        """See `StepCopies.arrive`."""
        self._check_open()
        sent = self._away.get(key)
        if sent is not None and sent.coming is not None:
            self._check_begun(sent)
            self._wait_back(sent)
            sent.coming = None

    def close(self) -> None:
        """See `StepCopies.close`. What is here is no business of a forked child, which only forgets it."""
        if self._closing.acquire(blocking=False):       # else another thread is at it
            try:
                if self._open and self._process == os.getpid():
                    self._give_up()
                elif self._open:
                    self._forget()
            finally:
                let_go(self._closing)

    def __del__(self) -> None:
        if hasattr(self, "_open") and not sys.is_finalizing():
            uninterrupted(self.close)()         # memory goes then that a copy may still be at

    def _forget(self) -> None:
        self._open, self.away_bytes, self._away = False, 0, {}

    def _check_open(self) -> None:
        if not self._open:
            raise OffloadError(f"{self._place}: these copies were closed")
        if self._process != os.getpid():
            raise OffloadError(f"{self._place}: a forked process cannot use data that its parent sent there")

    def _check_begun(self, sent: S) -> None:
        if not sent.begun:
            raise OffloadError(f"{self._place}: {sent.form.nbytes:,} bytes were not copied, because the "
                               "copy was interrupted")

    def _error(self, what: str, error: BaseException) -> OffloadError:
        return OffloadError(f"{self._place}: {what} ({reason_of(error)})")


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in words."""
    return str(error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
