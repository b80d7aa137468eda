"""Copies to a disk and back: the file, pages for direct reads and writes, and the engine of a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from rkmate.errors import ArgumentError, OffloadError
from rkmate.offload.copies import (
    BLOCK,
    CHUNK,
    LANES,
    AwayBytes,
    CallCopies,
    Chunk,
    Descriptor,
    Extent,
    Lanes,
    Mismatch,
    Queue,
    Room,
    Sent,
    Transfer,
    checksum,
    let_go,
    reason_of,
    uninterrupted,
)
from rkmate.support.warn import warn
from rkmate.torch_seam.tensors import Form

# -- Huge pages ------------------------------------------------------------------------------------
#
# Fewer and larger pages for memory that is about to be filled.
#
# Memory that the C library takes anew has no pages yet. The system finds and clears one at each first write,
# also where a disk writes: of 4 KiB each that takes the processor longer than all else about a copy, of 2
# MiB each it hardly takes any time. Linux gives those to who asks for them.


_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_HUGEPAGE = 14
"""Constant of sys/mman.h."""


def ask_for_huge_pages(address: int, size: int) -> None:
    """Request huge pages for memory that will be written, if whole huge pages fit into it. If the system has
    none, it uses small pages."""
    page, advise = _system()
    if advise is None:
        return
    start, end = -(-address // page) * page, (address + size) // page * page
    if start < end:
        advise(start, end - start, _MADV_HUGEPAGE)


@functools.cache
def _system() -> tuple[int, Callable[[int, int, int], int] | None]:
    """Return bytes of a huge page, and what asks for some; 0 and None where there is no such thing."""
    try:
        page = int(_SIZE.read_text(encoding="ascii"))
        advise = ctypes.CDLL(None).madvise
    except (OSError, ValueError, AttributeError, TypeError):
        return 0, None
    if sys.platform != "linux" or page <= 0:
        return 0, None
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return page, advise


# -- The file --------------------------------------------------------------------------------------
#
# The file that a process has in a folder for what is away.
#
# It has a name for a moment only: ``rkmate-<process>-<random>.away`` is unlinked as soon as it is open. The
# system frees its room when the process ends, however that happens, two processes never touch one another's,
# and the folder may be removed while a step runs. A process that is killed in that moment leaves an empty
# file, which the next one removes.
#
# Reads and writes are direct (``O_DIRECT``): what is away does not come back as pages that the system
# caches. Where a file system refuses that, each write waits until its pages are on the disk and can be
# forgotten; in a file system that is memory nothing is gained at all. Both are said by an `RkmateWarning`.
#
# A forked child has no part in the file: its descriptor is closed there, and its own calls open another.


BUFFER_BYTES = 2 * LANES * CHUNK + BLOCK
"""Bytes of a call's buffers: one for each thread, and the bytes to align them."""
_ALIGNED = (64, 512)
"""Alignments of memory, in bytes: of torch's allocations, and of many disks."""
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_NAME = "rkmate-*-*.away"


@dataclass(frozen=True, eq=False)
class Abandoned:
    """Data of a call that the garbage collector found in a copying thread. It has to live until its copies
    have ended."""

    transfers: list[Transfer]
    extents: list[Extent]
    memory: object
    """Memory that the threads may still read and write."""


class AwayFile:
    """A folder's file, with its threads, shared by all that send to the folder. It is closed when nothing
    refers to it any more, and at the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Open the file. Raises `OSError` if nothing can be written to the folder."""
        self._descriptor = _opened(folder)
        self._abandoned: deque[Abandoned] = deque()
        self.lanes = Lanes(self._descriptor, self._abandoned)
        self.room = Room(BLOCK, functools.partial(_reserve, self._descriptor))
        self.closing = weakref.finalize(self, self.lanes.stop)

    @property
    def aligned(self) -> int:
        """Return the multiple of bytes at which memory for direct reads and writes begins."""
        return self._descriptor.aligned

    def abandon(self, call: Abandoned) -> None:
        """Keep the data of a call that was collected in one of the threads."""
        for transfer in call.transfers:
            transfer.given_up = True
        self._abandoned.append(call)

    def sweep(self) -> None:
        """Free what abandoned calls have. Not in one of the threads."""
        for call in list(self._abandoned):
            self.lanes.without(call.transfers)      # who is interrupted here has to find it again
            with contextlib.suppress(ValueError):   # another thread was faster
                self._abandoned.remove(call)
                self.room.give(call.extents)

    def leave_to_parent(self) -> None:
        """Leave the file to the parent process; called in a forked child."""
        self.closing.detach()
        self._descriptor.close()


def _reserve(descriptor: Descriptor, extent: Extent) -> None:
    """Reserve room on the disk, so that a full disk raises now. Raises `OSError`."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor.number, *extent)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):     # what file systems say that cannot
            raise


def shared(folder: str | Path) -> AwayFile:
    """Return the file of a folder. Raises `OSError`: nothing can be written there."""
    path = Path(folder).expanduser().absolute()
    about = path.stat()
    with _lock:
        found = _files.get((about.st_dev, about.st_ino))
        if found is None:
            found = _files[about.st_dev, about.st_ino] = AwayFile(path)
        return found


def _opened(folder: Path) -> Descriptor:
    """Return a file without a name."""
    for left in folder.glob(_NAME):         # those in use have no name, and those that get one now need none
        with contextlib.suppress(OSError):
            left.unlink()
    if kind := _kind(folder):
        _warn_once(folder, f"{folder} is memory ({kind}), not a disk: what is sent there takes the machine's "
                           "memory all the same. Give a folder on a disk")
    direct = getattr(os, "O_DIRECT", 0)
    descriptor = _nameless(folder, direct) if direct else None
    if descriptor is not None:
        descriptor.aligned = next((a for a in _ALIGNED if _writes(descriptor, a)), BLOCK)
        return descriptor
    descriptor = _nameless(folder, 0)
    if descriptor is None:
        raise OSError(errno.EIO, "a first write failed")
    _warn_once(folder, f"{folder} refuses direct reads and writes: what is sent there goes through the "
                       "system's cache, which takes longer, and memory for a while. Give a folder on a disk "
                       "of this machine")
    return descriptor


def _nameless(folder: Path, direct: int) -> Descriptor | None:
    """Return an open file that was written to; None where it cannot be opened or written in this way."""
    path = folder / f"rkmate-{os.getpid()}-{uuid.uuid4().hex[:8]}.away"
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)        # some systems make it, and then refuse
        if direct and error.errno == errno.EINVAL:
            return None
        raise
    descriptor = Descriptor(number, direct=bool(direct))
    path.unlink(missing_ok=True)
    return descriptor if _writes(descriptor, BLOCK) else None


def _writes(descriptor: Descriptor, aligned: int) -> bool:
    """Return whether a block is written and read from memory whose address is a multiple of this, and of no
    more. Raises `OSError` for other reasons, such as a full disk."""
    with mmap.mmap(-1, 3 * BLOCK) as there:
        start = aligned % BLOCK
        with memoryview(there) as whole, whole[start:start + BLOCK] as view:
            try:
                return os.pwrite(descriptor.number, view, 0) == BLOCK \
                    and os.preadv(descriptor.number, [view], 0) == BLOCK
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                raise


def _kind(folder: Path) -> str | None:
    """Return the kind of a folder's file system, if that is memory."""
    device = folder.stat().st_dev
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                kind = rest.split()[0]
                return kind if kind in _MEMORY else None
    return None


def _warn_once(folder: Path, message: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warn(message)


_lock = threading.RLock()
_files: weakref.WeakValueDictionary[tuple[int, int], AwayFile] = weakref.WeakValueDictionary()
_warned: set[Path] = set()


class _Resting(threading.local):
    """Files whose threads are stopped while this thread forks."""

    files: tuple[AwayFile, ...] = ()


_resting = _Resting()


@uninterrupted
def _before_fork() -> None:
    """Stop the threads: the disk must not write to memory that is shared with a child."""
    _lock.acquire()
    _resting.files += tuple(_files.values())
    for file in _resting.files:
        file.lanes.rest()


@uninterrupted
def _in_parent() -> None:
    for file in _resting.files:
        file.lanes.resume()
    _resting.files = ()
    let_go(_lock)


@uninterrupted
def _in_child() -> None:
    global _lock
    _lock = threading.RLock()           # the old one may be a thread's that is not here
    for file in _files.values():
        file.leave_to_parent()
    _resting.files = ()
    _files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


# -- The engine ------------------------------------------------------------------------------------
#
# Copies between the CPU's memory and a folder on a disk.


class FolderEngine:
    """Sends to the file that this process has in a folder. Engines of one folder share it."""

    buffer_bytes = BUFFER_BYTES

    def __init__(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> None:
        """`most_bytes`: limit of the storages that the engine's calls have away at once (in the file, the
        end of each takes a whole block of 4 KiB, and its beginning another one). `verify`: whether
        data that comes back must have its original checksum.

        Raises:
            ArgumentError: nothing can be written to the folder.
        """
        self.place, self.most_bytes, self._verify = place, most_bytes, verify
        try:
            self._file: AwayFile | None = shared(place)
        except OSError as error:
            raise ArgumentError(f"offload is {place!r}, and no data can be sent there ({reason_of(error)}): "
                                "give an existing, writable folder on a disk with free space") from error
        self._process = os.getpid()
        self._bytes = AwayBytes(place, most_bytes)

    def open(self, *, verify: bool = False) -> DiskCopies:
        """See `CopyEngine.open`. Raises `OffloadError`: the engine is closed, or this is a forked child and
        the folder is gone."""
        if self._file is None:
            raise OffloadError(f"{self.place}: no data can be sent there any more: the engine was closed")
        if self._process != os.getpid():
            try:
                self._file = shared(self.place)
            except OSError as error:
                raise OffloadError(f"{self.place}: a forked process cannot send data there "
                                   f"({reason_of(error)})") from error
            self._process, self._bytes = os.getpid(), AwayBytes(self.place, self.most_bytes)
        return DiskCopies(self.place, self._file, self._bytes, verify=verify or self._verify)

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._file = None


class _Part(NamedTuple):
    """Bytes that are moved together."""

    start: int
    """Offset in the storage."""
    size: int
    offset: int
    """Offset in the file."""


@dataclass(eq=False)
class _OnDisk(Sent):
    """A storage, and where it is in the file."""

    extents: list[Extent]
    parts: tuple[_Part, ...]
    checksums: tuple[int | None, ...]
    """Checksum of each part; None if copies are not verified."""
    moving: Transfer | None = None
    """The last copy, out or back."""


class DiskCopies(CallCopies[_OnDisk]):
    """The copies of one call."""

    def __init__(self, place: str, file: AwayFile, away: AwayBytes, *, verify: bool) -> None:
        self._file, self._verify = file, verify
        file.sweep()
        self._buffers: torch.Tensor | None = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        """Buffers of the call; None once it is closed."""
        start = -(-self._buffers.data_ptr() // BLOCK) * BLOCK
        places = tuple(start + k * CHUNK for k in range(2 * LANES))
        self._out_buffers, self._back_buffers = places[:LANES], places[LANES:]
        super().__init__(place, torch.device("cpu"), away)

    def _take(self, form: Form, tensor: torch.Tensor) -> _OnDisk:
        before = -tensor.untyped_storage().data_ptr() % self._file.aligned
        if before >= min(BLOCK, form.nbytes):
            before = 0
        extents = self._file.room.take(form.nbytes + (BLOCK - before if before else 0))
        parts = tuple(_parts(extents, form.nbytes, before))
        return _OnDisk(form, tensor, extents, parts, (None,) * len(parts))

    def _send(self, sent: _OnDisk, content: torch.UntypedStorage) -> None:
        start = content.data_ptr()
        if self._verify:
            sent.checksums = tuple(checksum(start + part.start, part.size) for part in sent.parts)
        sent.moving = transfer = Transfer(len(sent.parts), self._out_buffers)
        self._put(self._file.lanes.out, sent, [
            Chunk(transfer, start + part.start, part.size, part.offset) for part in sent.parts])

    def _wait_out(self, sent: _OnDisk) -> None:
        self._wait(sent, "written")

    def _fetch(self, sent: _OnDisk, content: torch.UntypedStorage) -> None:
        start = content.data_ptr()
        ask_for_huge_pages(start, sent.form.nbytes)
        sent.moving = transfer = Transfer(len(sent.parts), self._back_buffers)
        self._put(self._file.lanes.back, sent, [
            Chunk(transfer, start + part.start, part.size, part.offset, expected)
            for part, expected in zip(sent.parts, sent.checksums, strict=True)])

    def _wait_back(self, sent: _OnDisk) -> None:
        self._wait(sent, "read")

    def _put(self, queue: Queue, sent: _OnDisk, chunks: list[Chunk]) -> None:
        try:
            self._file.lanes.put(queue, chunks)
        except RuntimeError as error:
            raise self._error(f"{sent.form.nbytes:,} bytes could not be copied", error) from error

    def _wait(self, sent: _OnDisk, what: str) -> None:
        transfer, size = sent.moving, sent.form.nbytes
        assert transfer is not None
        transfer.over.wait()
        if isinstance(transfer.error, Mismatch):
            raise OffloadError(f"{self._place}: some of {size:,} bytes differ from those that were sent: the "
                               "disk lost them, or they were written to while they were copied")
        if transfer.error is not None:
            raise self._error(f"{size:,} bytes could not be {what}", transfer.error)

    def _give_up(self) -> None:
        away = list(self._away.values())
        transfers = [sent.moving for sent in away if sent.moving is not None]
        extents = [extent for sent in away for extent in sent.extents]
        file = self._file
        if file.lanes.here():
            # The collector of garbage runs in a thread that copies, which cannot wait for itself.
            file.abandon(Abandoned(transfers, extents, [away, self._buffers]))
            self._forget()
        else:
            file.lanes.without(transfers)
            self._forget()
            file.room.give(extents)
            file.sweep()

    def _forget(self) -> None:
        super()._forget()
        self._buffers = None


def _parts(extents: list[Extent], size: int, before: int) -> Iterator[_Part]:
    """Yield the parts of a storage of `size` bytes: the `before` bytes that come before aligned memory, then
    whole blocks, then the rest."""
    done = 0
    for extent in extents:
        offset, end = extent.offset, extent.offset + extent.size
        while offset < end and done < size:
            some = min(before - done if done < before else CHUNK, size - done, end - offset)
            if some > BLOCK:
                some -= some % BLOCK
            yield _Part(done, some, offset)
            done += some
            offset += -(-some // BLOCK) * BLOCK
