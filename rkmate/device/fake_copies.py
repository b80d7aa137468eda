"""The copies of the tests' accelerator: each is done when it is begun."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch

from rkmate.device.away_bytes import AwayBytes
from rkmate.device.call_copies import CallCopies, Sent
from rkmate.device.forms import Form


class FakeEngine:
    """Sends to bytes of Python's."""

    def __init__(self, place: str, most_bytes: int | None = None, *, verify: bool = False,
                 buffer_bytes: int = 0) -> None:
        """`buffer_bytes`: that an open call takes, for nothing."""
        self.place, self.most_bytes, self.verify, self.buffer_bytes = place, most_bytes, verify, buffer_bytes
        self.away = AwayBytes(place, most_bytes)
        self.calls: weakref.WeakSet[FakeCopies] = weakref.WeakSet()
        """That are open."""

    def open(self, *, verify: bool = False) -> FakeCopies:
        """See `CopyEngine.open`. Nothing gets lost here."""
        return FakeCopies(self)

    def close(self) -> None:
        """Nothing is kept."""


@dataclass(eq=False)
class _Stored(Sent):
    content: bytes = b""


class FakeCopies(CallCopies[_Stored]):
    """The copies of one call."""

    def __init__(self, engine: FakeEngine) -> None:
        self._calls = engine.calls
        self._buffers: torch.Tensor | None = torch.empty(engine.buffer_bytes, dtype=torch.uint8, device="cpu")
        super().__init__(engine.place, torch.device("cpu"), engine.away)
        self._calls.add(self)

    def _take(self, form: Form, tensor: torch.Tensor) -> _Stored:
        return _Stored(form, tensor)

    def _send(self, sent: _Stored, content: torch.UntypedStorage) -> None:
        sent.content = ctypes.string_at(content.data_ptr(), sent.form.nbytes)

    def _wait_out(self, sent: _Stored) -> None:
        """It has been copied."""

    def _fetch(self, sent: _Stored, content: torch.UntypedStorage) -> None:
        ctypes.memmove(content.data_ptr(), sent.content, sent.form.nbytes)

    def _wait_back(self, sent: _Stored) -> None:
        """It has been copied."""

    def _give_up(self) -> None:
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._buffers = None
        self._calls.discard(self)
