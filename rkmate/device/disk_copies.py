"""Copies between the CPU's memory and a folder on a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rkmate.device.away_bytes import AwayBytes
from rkmate.device.away_file import BUFFER_BYTES, Abandoned, AwayFile, shared
from rkmate.device.call_copies import CallCopies, Sent, reason_of
from rkmate.device.forms import Form
from rkmate.device.huge_pages import ask_for_huge_pages
from rkmate.device.lanes import BLOCK, CHUNK, LANES, Chunk, Mismatch, Queue, Transfer, checksum
from rkmate.device.room import Extent
from rkmate.errors import ArgumentError, OffloadError


class FolderEngine:
    """Sends to the file that this process has in a folder. Engines of one folder share it."""

    buffer_bytes = BUFFER_BYTES

    def __init__(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> None:
        """`most_bytes`: of the storages that its calls have away at once (in the file the end of each takes a
        whole block of 4 KiB, and its begin another). `verify`: what comes back must have the checksum of what
        went.

        Raises:
            ArgumentError: nothing can be written to the folder.
        """
        self.place, self.most_bytes, self._verify = place, most_bytes, verify
        try:
            self._file: AwayFile | None = shared(place)
        except OSError as error:
            raise ArgumentError(f"offload is {place!r}, where nothing can be sent ({reason_of(error)}): give "
                                "a folder that is there and can be written, on a disk with room") from error
        self._process = os.getpid()
        self._bytes = AwayBytes(place, most_bytes)

    def open(self, *, verify: bool = False) -> DiskCopies:
        """See `CopyEngine.open`. Raises `OffloadError`: the engine is closed, or this is a forked child and
        the folder is gone."""
        if self._file is None:
            raise OffloadError(f"{self.place}: nothing more is sent there, it was closed")
        if self._process != os.getpid():
            try:
                self._file = shared(self.place)
            except OSError as error:
                raise OffloadError(f"{self.place}: nothing can be sent there by a forked process "
                                   f"({reason_of(error)})") from error
            self._process, self._bytes = os.getpid(), AwayBytes(self.place, self.most_bytes)
        return DiskCopies(self.place, self._file, self._bytes, verify=verify or self._verify)

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._file = None


class _Part(NamedTuple):
    """What is moved at a time."""

    start: int
    """In the storage."""
    size: int
    offset: int
    """In the file."""


@dataclass(eq=False)
class _OnDisk(Sent):
    """A storage, and where it is in the file."""

    extents: list[Extent]
    parts: tuple[_Part, ...]
    checksums: tuple[int | None, ...]
    """Of each part; None where nothing is verified."""
    moving: Transfer | None = None
    """The last copy, out or back."""


class DiskCopies(CallCopies[_OnDisk]):
    """The copies of one call."""

    def __init__(self, place: str, file: AwayFile, away: AwayBytes, *, verify: bool) -> None:
        self._file, self._verify = file, verify
        file.sweep()
        self._buffers: torch.Tensor | None = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        """None once it is closed."""
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
            raise OffloadError(f"{self._place}: of {size:,} bytes some are not those that were sent: the "
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
    """A storage of `size` bytes: the `before` bytes before memory that the disk takes as it stands, whole
    blocks of that, and what is left."""
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
