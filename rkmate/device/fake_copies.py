"""The copies of the tests' accelerator: each is done when it is begun."""

from __future__ import annotations

import ctypes

import torch

from rkmate.device.forms import Form
from rkmate.errors import OffloadError


class FakeEngine:
    """Sends to bytes of Python's."""

    def __init__(self, place: str, most_bytes: int | None = None, *, verify: bool = False,
                 buffer_bytes: int = 0) -> None:
        """`buffer_bytes`: that an open call takes, for nothing."""
        self.place, self.most_bytes, self.verify, self.buffer_bytes = place, most_bytes, verify, buffer_bytes
        self.calls: list[FakeCopies] = []
        """That are open."""

    def open(self, *, verify: bool = False) -> FakeCopies:
        """See `CopyEngine.open`. Nothing gets lost here."""
        self.calls.append(FakeCopies(self))
        return self.calls[-1]

    def close(self) -> None:
        """Nothing is kept."""


class FakeCopies:
    """The copies of one call. Raises `KeyError` for what is done in another order than can be."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffers: torch.Tensor | None = torch.empty(engine.buffer_bytes, dtype=torch.uint8, device="cpu")
        self._away: dict[str, tuple[Form, bytes]] = {}
        self._leaving: set[str] = set()
        self.log: list[tuple[str, str]] = []
        """What was asked for, and of which key."""

    def out(self, key: str, tensor: torch.Tensor) -> None:
        """See `StepCopies.out`."""
        self._ask("out", key)
        if key in self._away:
            raise KeyError(key)
        form, most = Form.of(tensor), self._engine.most_bytes
        if most is not None and form.nbytes + sum(f.nbytes for f, _ in self._away.values()) > most:
            raise OffloadError(f"{self._engine.place}: {form.nbytes:,} bytes are more than may be there")
        self._away[key] = form, ctypes.string_at(tensor.untyped_storage().data_ptr(), form.nbytes)
        self._leaving.add(key)

    def leave(self, key: str) -> None:
        """See `StepCopies.leave`."""
        self._ask("leave", key)
        self._leaving.remove(key)

    def back(self, key: str) -> torch.Tensor:
        """See `StepCopies.back`."""
        self._ask("back", key)
        if key in self._leaving:
            raise KeyError(key)
        form, content = self._away[key]
        storage = torch.empty(form.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        ctypes.memmove(storage.data_ptr(), content, form.nbytes)
        return form.over(storage)

    def arrive(self, key: str) -> None:
        """See `StepCopies.arrive`."""
        self._ask("arrive", key)

    def close(self) -> None:
        """See `StepCopies.close`."""
        self._away, self._buffers = {}, None
        if self in self._engine.calls:
            self._engine.calls.remove(self)

    def _ask(self, what: str, key: str) -> None:
        if self._buffers is None:
            raise OffloadError(f"{self._engine.place}: these copies were closed")
        self.log.append((what, key))
