"""What the copies of a call are in every engine: their order, what is away, and their end."""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from rkmate.device.away_bytes import AwayBytes
from rkmate.device.forms import Form
from rkmate.device.lanes import let_go, uninterrupted
from rkmate.errors import OffloadError


@dataclass(eq=False)
class Sent:
    """A storage that a call has sent."""

    form: Form
    leaving: torch.Tensor | None
    """What is copied away; None when it has left."""
    coming: torch.Tensor | None = field(default=None, init=False)
    """Where it is copied back to, until it is there."""
    begun: bool = field(default=False, init=False)
    """Whether all of the last copy, out or back, was asked for: else that was interrupted."""


S = TypeVar("S", bound=Sent)


class CallCopies(ABC, Generic[S]):
    """See `StepCopies`. One thread at a time may use it, any may close it."""

    room = "room"
    """What `_take` takes, in words."""

    def __init__(self, place: str, device: torch.device, away: AwayBytes) -> None:
        """`away`: counts what all calls of its engine have there."""
        self._place, self._device, self._bytes = place, device, away
        self._process = os.getpid()
        self._closing = threading.RLock()       # of this thread: an interrupted close can be done again
        self.away_bytes = 0
        """Of the storages that it has sent, until it is closed."""
        self._away: dict[str, S] = {}
        self._open = True

    # -- what an engine does -----------------------------------------------------------------

    @abstractmethod
    def _take(self, form: Form, tensor: torch.Tensor) -> S:
        """Room for a storage. Raises `OSError` or `RuntimeError`: there is none."""

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
            raise ValueError(f"{key} was sent away before")
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
            raise ValueError(f"{key} has left before")
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
            raise OffloadError(f"{self._place}: what another process sent there is not a forked child's")

    def _check_begun(self, sent: S) -> None:
        if not sent.begun:
            raise OffloadError(f"{self._place}: {sent.form.nbytes:,} bytes were not copied: that was "
                               "interrupted")

    def _error(self, what: str, error: BaseException) -> OffloadError:
        return OffloadError(f"{self._place}: {what} ({reason_of(error)})")


def reason_of(error: BaseException) -> str:
    """Of an error, in words."""
    return str(error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
