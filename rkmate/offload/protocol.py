"""The protocol of engines that copy data away while a device computes, and how long their copies take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

# -- The protocol ----------------------------------------------------------------------------------
#
# What copies a device's data away during a step, and back: one protocol for disks and host memory.
#
# Keys are the caller's; a key is copied out at most once in a call. Errors of the place are `OffloadError`,
# which names the place and the bytes; they are raised in the calling thread, by `out`, `leave`, `back` or
# `arrive`. After one the call can only be closed, and the next call works.


class StepCopies(Protocol):
    """The copies of one call: one forward and its backward."""

    def out(self, key: str, tensor: torch.Tensor) -> None:
        """Begin to copy the tensor's whole storage away. Nobody may write to it before `leave`."""

    def leave(self, key: str) -> None:
        """Wait for the end of that copy; nothing here refers to the tensor any more."""

    def back(self, key: str) -> torch.Tensor:
        """Make room (a new storage, allocated by torch in the calling thread, of the same bytes; same dtype,
        shape, strides, offset) and begin the copy back. May be called several times for a key, one after
        another, after its `leave`."""

    def arrive(self, key: str) -> None:
        """Wait for the end of this copy: nobody may read the tensor before. Does nothing if no copy is under
        way."""

    def close(self) -> None:
        """Wait for, or give up, what is under way; free buffers and room. Idempotent; safe from any thread
        and from ``__del__``, which calls it."""


class CopyEngine(Protocol):
    """Copies between one device and one place, for any number of calls at once."""

    @property
    def place(self) -> str:
        """The target of copies: ``"host"``, or a folder."""

    @property
    def most_bytes(self) -> int | None:
        """Bytes that the engine's calls may have away at once, in total; None: no limit except the free
        space."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the device that an open call takes, as the device's meter counts them."""

    def open(self, *, verify: bool = False) -> StepCopies:
        """Open the copies of one call. Takes the call's buffers in the calling thread, so that the meter sees
        them; `close` frees them. `verify`: data that comes back in this call must have its original
        checksum."""

    def close(self) -> None:
        """Open no more calls. The room is returned when the open calls are closed."""


# -- Times -----------------------------------------------------------------------------------------
#
# When copies end that nobody waits for, because the device computes meanwhile.


def ends_by_threads(call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                    compute: Callable[[], object]) -> tuple[float, float]:
    """See `Device.ends_of`: two threads wait. What these raise is raised here."""
    now = time.perf_counter()
    begin()
    outs = _Waiting(call.leave, out, now)
    backs = _Waiting(call.arrive, back, now)
    try:
        while outs.is_alive() or backs.is_alive():
            compute()
    finally:
        outs.join()
        backs.join()
    for waiting in (outs, backs):
        if waiting.error is not None:
            raise waiting.error
    return outs.seconds, backs.seconds


class _Waiting(threading.Thread):
    """Waits for copies, and looks at the clock."""

    def __init__(self, wait: Callable[[str], None], keys: Sequence[str], start: float) -> None:
        super().__init__(daemon=True)
        self._wait, self._keys, self._since = wait, keys, start
        self.seconds = 0.0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Run the thread: wait for the copies one after another."""
        try:
            for key in self._keys:
                self._wait(key)
        except Exception as error:
            self.error = error
        self.seconds = time.perf_counter() - self._since
