"""Threads that move bytes between memory and a file.

Each direction has a queue of chunks and two threads: while one waits for the disk, the other copies memory.
They call nothing of torch (its kernels would start threads of their own here), and what they call leaves the
interpreter to the others. They know addresses: who starts a transfer keeps the memory until it is over, so
that memory is never freed in these threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

LANES = 2
"""Threads of a direction."""
BLOCK = 4096
"""Direct reads and writes are in multiples of so many bytes, in the file and in memory."""
CHUNK = 2**20
"""Bytes that are moved at a time, at most, and of a thread's buffer."""
_LOOK_SECONDS = 2e-4
"""Between looks at a thread that is to be done with a chunk."""


class Transfer:
    """A copy of one storage, one way, in chunks."""

    def __init__(self, chunks: int, buffers: tuple[int, ...]) -> None:
        """`buffers`: each lane's, by its address."""
        self.buffers = buffers
        self.given_up = False
        """Set by whoever needs it no more: chunks that nobody has begun are left out."""
        self.error: BaseException | None = None
        """The first that occurred; before the end of the transfer it means nothing."""
        self.over = threading.Event()
        """Set when all chunks were moved or left out."""
        self._left = chunks
        self._lock = threading.Lock()
        if not chunks:
            self.over.set()

    def count(self, error: BaseException | None) -> None:
        """A chunk is over."""
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
    """In memory."""
    size: int
    offset: int
    """In the file."""
    checksum: int | None = None
    """Which its bytes should have when they are back."""


class Mismatch(Exception):
    """What came back is not what went."""


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
        """From memory to the file."""
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
        """From the file to memory."""
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
        """The address of the buffer that a chunk takes its way over; 0 for none."""
        return chunk.transfer.buffers[lane] if chunk.address % self.aligned or chunk.size % BLOCK else 0

    def _forget(self, chunk: Chunk) -> None:
        """The system need not keep the pages."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, chunk.offset, chunk.size, os.POSIX_FADV_DONTNEED)


def _advanced(done: int, some: int, size: int, what: str) -> int:
    """How much is done after another call, in whole blocks unless that is all. Raises `OSError` where it got
    no further, as at the end of the file."""
    if done + some >= size:
        return size
    if some < BLOCK:
        raise OSError(errno.EIO, f"only {some:,} bytes of {size - done:,} could be {what}")
    return (done + some) // BLOCK * BLOCK


def memory(address: int, size: int) -> memoryview:
    """Memory at an address, which it does not keep."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def checksum(address: int, size: int) -> int:
    """Of bytes in memory."""
    return zlib.crc32(memory(address, size))


def let_go(lock: threading.RLock) -> None:
    """Release a lock as often as this thread has acquired it."""
    with contextlib.suppress(RuntimeError):         # it is not this thread's
        while True:
            lock.release()


def uninterrupted(call: Callable[[], None]) -> Callable[[], None]:
    """Where Python drops what a call raises and goes on, as around a fork and in a collector: half of it is
    worse than a Ctrl-C that is lost. It begins anew."""
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
        """`keep`: what has to live as long as the threads do."""
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
        """Whether this thread is one of them."""
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
        """The opposite of `rest`, in the same thread; also of one that was interrupted, or done twice."""
        for lane in self._lanes:
            let_go(lane.working)


class Lane:
    """A thread, and what it works on."""

    def __init__(self, number: int, queue: Queue, move: Callable[[Chunk, int], None]) -> None:
        self.queue = queue
        self.thread: threading.Thread | None = None
        self.transfer: Transfer | None = None
        """Whose chunk it moves now."""
        self.working = threading.RLock()
        """Held while it moves a chunk. It knows who holds it: nobody lets go of it for another."""
        self.stopped = False
        """Set when it is to move no more."""
        self._number, self._move = number, move

    @property
    def started(self) -> bool:
        """Whether it has a thread that runs, or has run."""
        return self.thread is not None and self.thread.ident is not None

    def work(self, _keep: object) -> None:
        """What the thread does."""
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
