"""The file that a process has in a folder for what is away.

It has a name for a moment only: ``rkmate-<process>-<random>.away`` is unlinked as soon as it is open. The
system frees its room when the process ends, however that happens, two processes never touch one another's,
and the folder may be removed while a step runs. A process that is killed in that moment leaves an empty file,
which the next one removes.

Reads and writes are direct (``O_DIRECT``): what is away does not come back as pages that the system caches.
Where a file system refuses that, each write waits until its pages are on the disk and can be forgotten; in a
file system that is memory nothing is gained at all. Both are said by an `RkmateWarning`.

A forked child has no part in the file: its descriptor is closed there, and its own calls open another.
"""
from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import threading
import uuid
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rkmate.device.lanes import BLOCK, CHUNK, LANES, Descriptor, Lanes, Transfer, let_go, uninterrupted
from rkmate.device.room import Extent, Room
from rkmate.support.warn import warn

BUFFER_BYTES = 2 * LANES * CHUNK + BLOCK
"""Of a call: one for each thread, and what aligning them takes."""
_ALIGNED = (64, 512)
"""Of memory: as torch's is, and as many disks want it."""
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_NAME = "rkmate-*-*.away"


@dataclass(frozen=True, eq=False)
class Abandoned:
    """What a call had when it was collected in a thread that copies: it has to live until that is over."""

    transfers: list[Transfer]
    extents: list[Extent]
    memory: object
    """What the threads may still read and write."""


class AwayFile:
    """One folder's file, with its threads; shared by all that send there. It is closed when nobody has it
    any more, and at the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError`: nothing can be written there."""
        self.folder = folder
        self._descriptor = _opened(folder)
        self._abandoned: deque[Abandoned] = deque()
        self.lanes = Lanes(self._descriptor, self._abandoned)
        self.room = Room(BLOCK, functools.partial(_reserve, self._descriptor))
        self.closing = weakref.finalize(self, self.lanes.stop)

    @property
    def aligned(self) -> int:
        """Where memory should begin, to be read and written as it stands: see `Descriptor.aligned`."""
        return self._descriptor.aligned

    def abandon(self, call: Abandoned) -> None:
        """Of a call that was collected in one of the threads."""
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
        """In a forked child."""
        self.closing.detach()
        self._descriptor.close()


def _reserve(descriptor: Descriptor, extent: Extent) -> None:
    """Room on the disk: a full one says so now. Raises `OSError`."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor.number, *extent)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):     # what file systems say that cannot
            raise


def shared(folder: str | Path) -> AwayFile:
    """The file of a folder. Raises `OSError`: nothing can be written there."""
    path = Path(folder).expanduser().absolute()
    about = path.stat()
    with _lock:
        found = _files.get((about.st_dev, about.st_ino))
        if found is None:
            found = _files[about.st_dev, about.st_ino] = AwayFile(path)
        return found


def _opened(folder: Path) -> Descriptor:
    """A file without a name."""
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
    """An open file that was written to; None where it cannot be opened or written in this way."""
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
    """Whether a block is written and read from memory whose address is a multiple of this, and of no more.
    Raises `OSError` for other reasons, such as a full disk."""
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
    """The kind of a folder's file system, if that is memory."""
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
    """What the thread that forks holds still."""

    files: tuple[AwayFile, ...] = ()


_resting = _Resting()


@uninterrupted
def _before_fork() -> None:
    """The disk must not write memory while it is shared with a child."""
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
