"""A copy engine for tests that does everything as late as it may, and plans that send data away.

What is written too early, read too early or overwritten meanwhile is then wrong, every time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rkmate.device.cpu import Cpu
from rkmate.errors import OffloadError
from rkmate.ir.link import Link
from rkmate.ir.schedule import Schedule
from rkmate.ir.simulate import peak_of_calls, simulate
from rkmate.show.plan import Plan
from tests.planners.send_all import send_all

BUFFERS = 4096


class LateEngine:
    """Copies to memory that no meter counts."""

    place, most_bytes, buffer_bytes = "late", None, BUFFERS

    def __init__(self, fails_at: int | None = None, error: type[BaseException] = OffloadError) -> None:
        """`fails_at`: the number of the call of a copy that raises, once; counted over all calls, from 0."""
        self.fails_at, self.error = fails_at, error
        self.calls = self.opened = self.closed = 0
        """Copies that were asked for; open calls, and those that are closed."""
        self.words: list[str] = []
        self.verified = 0
        """How many of the calls were to be verified."""
        self.ended = 0
        """How often the engine itself was closed."""

    def open(self, *, verify: bool = False) -> LateCopies:
        self.opened += 1
        self.verified += verify
        return LateCopies(self)

    def close(self) -> None:
        self.ended += 1

    def count(self, word: str) -> None:
        self.words.append(word)
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise self.error(f"late: {word} failed")


class LateCopies:
    """Of one call."""

    def __init__(self, engine: LateEngine) -> None:
        self.engine = engine
        self.buffers: Any = torch.empty(engine.buffer_bytes, dtype=torch.uint8)
        self.leaving: dict[str, torch.Tensor] = {}
        self.away: dict[str, tuple[bytes, Any]] = {}
        self.coming: dict[str, torch.Tensor] = {}

    def out(self, key: str, tensor: torch.Tensor) -> None:
        assert key not in self.leaving and key not in self.away
        self.engine.count("out")
        self.leaving[key] = tensor

    def leave(self, key: str) -> None:
        self.engine.count("leave")
        tensor = self.leaving.pop(key)
        storage = tensor.untyped_storage()
        form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self.away[key] = ctypes.string_at(storage.data_ptr(), storage.nbytes()), form
        ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())      # nobody may read it now

    def back(self, key: str) -> torch.Tensor:
        assert key not in self.coming
        self.engine.count("back")
        data, (dtype, offset, shape, stride) = self.away[key]
        storage = torch.empty(len(data), dtype=torch.uint8).untyped_storage()
        ctypes.memset(storage.data_ptr(), 0xFF, len(data))
        self.coming[key] = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        return self.coming[key]

    def arrive(self, key: str) -> None:
        self.engine.count("arrive")
        tensor = self.coming.pop(key)
        data, _ = self.away[key]
        ctypes.memmove(tensor.untyped_storage().data_ptr(), data, len(data))

    def close(self) -> None:
        if self.buffers is not None:
            self.engine.closed += 1
        self.buffers = None
        for held in (self.leaving, self.away, self.coming):
            held.clear()

    __del__ = close


def use(monkeypatch: pytest.MonkeyPatch, engine: LateEngine) -> LateEngine:
    """On the CPU, plans send data to this engine, whatever folder they name."""
    monkeypatch.setattr(Cpu, "copy_engine", lambda self, place, most_bytes=None, *, verify=False: engine)
    return engine


Change = Callable[..., Schedule]


def sending(plan: Plan, change: Change = send_all, link: Link | None = None) -> Plan:
    """The plan with the schedule that `change` makes of its graph and its schedule."""
    link = link or Link(1e9, 1e9, 1e-3, BUFFERS)
    graph = plan.graph.with_link(link)
    schedule = change(graph.cd, plan.schedule)
    result = simulate(graph.cd, schedule)
    peak = peak_of_calls(graph.cd, schedule, plan.calls)
    return replace(plan, graph=graph, schedule=schedule, peak_bytes=peak, step_seconds=result.seconds,
                   budget_bytes=max(plan.budget_bytes, peak))
