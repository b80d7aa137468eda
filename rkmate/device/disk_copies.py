"""Copies between the CPU's memory and a folder on a disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rkmate.device.away_bytes import AwayBytes
from rkmate.device.away_file import BUFFER_BYTES, Abandoned, AwayFile, shared
from rkmate.device.forms import Form
from rkmate.device.lanes import BLOCK, CHUNK, LANES, Chunk, Mismatch, Transfer, checksum
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
            raise ArgumentError(f"offload is {place!r}, where nothing can be sent ({_reason(error)}): give a "
                                "folder that is there and can be written, on a disk with room") from error
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
                                   f"({_reason(error)})") from error
            self._process, self._bytes = os.getpid(), AwayBytes(self.place, self.most_bytes)
        return DiskCopies(self.place, self._file, self._bytes, verify=verify or self._verify)

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._file = None


class DiskCopies:
    """The copies of one call. One thread at a time may use it."""

    def __init__(self, place: str, file: AwayFile, away: AwayBytes, *, verify: bool) -> None:
        self._process = os.getpid()
        self._place, self._file, self._bytes, self._verify = place, file, away, verify
        self._closing = threading.Lock()
        self.away_bytes = 0
        """Of the storages that it has sent, until it is closed."""
        self._away: dict[str, _Away] = {}
        self._leaving: dict[str, tuple[torch.Tensor, Transfer]] = {}
        self._coming: dict[str, tuple[torch.Tensor, Transfer]] = {}
        file.sweep()
        self._buffers: torch.Tensor | None = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        """None once it is closed."""
        start = -(-self._buffers.data_ptr() // BLOCK) * BLOCK
        places = tuple(start + k * CHUNK for k in range(2 * LANES))
        self._out_buffers, self._back_buffers = places[:LANES], places[LANES:]

    def out(self, key: str, tensor: torch.Tensor) -> None:
        """See `StepCopies.out`."""
        file = self._usable()
        if key in self._away:
            raise ValueError(f"{key} was sent away before")
        form, start = Form.of(tensor), tensor.untyped_storage().data_ptr()
        self._bytes.add(self, form.nbytes)
        before = -start % file.aligned
        if before >= min(BLOCK, form.nbytes):
            before = 0
        try:
            extents = file.room.take(form.nbytes + (BLOCK - before if before else 0))
        except OSError as error:
            self.away_bytes -= form.nbytes
            raise self._error(f"there is no room for {form.nbytes:,} bytes", error) from error
        parts = tuple(_parts(extents, form.nbytes, before))
        sums = tuple(checksum(start + p.start, p.size) if self._verify else None for p in parts)
        self._away[key] = _Away(form, extents, parts, sums)
        transfer = Transfer(len(parts), self._out_buffers)
        self._leaving[key] = tensor, transfer
        file.lanes.start()
        for part in parts:
            file.lanes.out.put(Chunk(transfer, start + part.start, part.size, part.offset))

    def leave(self, key: str) -> None:
        """See `StepCopies.leave`."""
        self._usable()
        transfer = self._leaving[key][1]
        transfer.over.wait()
        if transfer.error is not None:
            raise self._error(f"{self._away[key].form.nbytes:,} bytes could not be written", transfer.error)
        del self._leaving[key]

    def back(self, key: str) -> torch.Tensor:
        """See `StepCopies.back`."""
        file = self._usable()
        if key in self._leaving:
            raise ValueError(f"{key} has not left")
        self.arrive(key)
        away = self._away[key]
        storage = torch.UntypedStorage(away.form.nbytes, device="cpu")
        tensor, start = away.form.over(storage), storage.data_ptr()
        transfer = Transfer(len(away.parts), self._back_buffers)
        self._coming[key] = tensor, transfer
        file.lanes.start()
        for part, expected in zip(away.parts, away.checksums, strict=True):
            file.lanes.back.put(Chunk(transfer, start + part.start, part.size, part.offset, expected))
        return tensor

    def arrive(self, key: str) -> None:
        """See `StepCopies.arrive`."""
        self._usable()
        if key not in self._coming:
            return
        transfer = self._coming[key][1]
        transfer.over.wait()
        size = self._away[key].form.nbytes
        if isinstance(transfer.error, Mismatch):
            raise OffloadError(f"{self._place}: of {size:,} bytes some are not those that were sent: the "
                               "disk lost them, or they were written to while they were copied")
        if transfer.error is not None:
            raise self._error(f"{size:,} bytes could not be read", transfer.error)
        del self._coming[key]

    def close(self) -> None:
        """See `StepCopies.close`."""
        if self._closing.acquire(blocking=False):       # else another thread is at it
            try:
                if self._buffers is not None:
                    self._close()
            finally:
                self._closing.release()

    def _close(self) -> None:
        moving = [*self._leaving.values(), *self._coming.values()]
        transfers = [transfer for _, transfer in moving]
        extents = [extent for away in self._away.values() for extent in away.extents]
        if self._process != os.getpid():        # nothing here is a forked child's
            self._forget()
        elif self._file.lanes.here():
            # The collector of garbage runs in a thread that copies, which cannot wait for itself.
            self._file.abandon(Abandoned(transfers, extents, [moving, self._buffers]))
            self._forget()
        else:
            self._file.lanes.without(transfers)
            self._forget()
            self._file.room.give(extents)

    def __del__(self) -> None:
        if hasattr(self, "_buffers"):
            self.close()

    def _forget(self) -> None:
        self.away_bytes, self._buffers = 0, None
        self._leaving, self._coming, self._away = {}, {}, {}

    def _usable(self) -> AwayFile:
        if self._buffers is None:
            raise OffloadError(f"{self._place}: these copies were closed")
        if self._process != os.getpid():
            raise OffloadError(f"{self._place}: what another process sent there is not a forked child's")
        return self._file

    def _error(self, what: str, error: BaseException) -> OffloadError:
        return OffloadError(f"{self._place}: {what} ({_reason(error)})")


class _Part(NamedTuple):
    """What is moved at a time."""

    start: int
    """In the storage."""
    size: int
    offset: int
    """In the file."""


@dataclass(frozen=True)
class _Away:
    """What was sent."""

    form: Form
    extents: list[Extent]
    parts: tuple[_Part, ...]
    checksums: tuple[int | None, ...]
    """Of each part; None where nothing is verified."""


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


def _reason(error: BaseException) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
