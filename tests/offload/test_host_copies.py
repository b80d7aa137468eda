"""Copies between a GPU and the host, where there is none: which stream waits for what, and who has room.

Streams are doubles that note what they are told; copies are done at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rkmate.errors import OffloadError
from rkmate.offload import cuda as cuda_copies
from rkmate.offload.copies import Extent
from rkmate.offload.cuda import HostEngine, PinnedPool, pool_of
from tests.offload.test_copy_engine import same, some

CPU = torch.device("cpu")


class Stream:
    """One that nothing is done on."""

    def __init__(self, _: object = None) -> None:
        self.waits: list[object] = []
        """Events that it was told to wait for."""
        self.events: list[object] = []
        """That were recorded on it."""
        self.holds: list[torch.Tensor] = []
        """Whose memory nobody has before it is done."""

    def record_event(self) -> object:
        self.events.append(object())
        return self.events[-1]

    def wait_event(self, event: object) -> None:
        assert event is not None
        self.waits.append(event)


def grow(slabs: list[torch.Tensor], extent: Extent) -> None:
    size = cuda_copies.SLAB
    slabs += [torch.empty(size, dtype=torch.uint8) for _ in range(extent.size // size)]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    now = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: stream.holds.append(self))
    monkeypatch.setattr(cuda_copies, "SLAB", 2**16)
    monkeypatch.setattr(cuda_copies, "_grow", grow)
    found: PinnedPool = pool_of(CPU)
    yield found
    assert found.room.take(found.room.end) == ([Extent(0, found.room.end)] if found.room.end else [])


def test_there_and_back(pool: Any) -> None:
    engine, tensor = HostEngine(CPU, 150_000, verify=True), some(150_000)
    call = engine.open()
    call.out("a", tensor)
    call.leave("a")
    found = call.back("a")
    call.arrive("a")
    assert same(found, tensor)
    with pytest.raises(OffloadError, match="host: 1 more bytes would make 150,001"):
        call.out("b", some(1))
    call.close()
    assert call.away_bytes == 0


def test_what_changed_on_its_way_is_seen(pool: Any) -> None:
    call = HostEngine(CPU, verify=True).open()
    call.out("a", some(100))
    call.leave("a")
    pool._slabs[0][7] += 1
    call.back("a")
    with pytest.raises(OffloadError, match="host: some of 100 bytes differ from those that were sent"):
        call.arrive("a")
    call.close()


def test_room_is_written_when_all_have_read_it(pool: Any) -> None:
    engine = HostEngine(CPU)
    one, other = engine.open(), engine.open()
    for call in (one, other):
        call.out("a", some(1000))
        call.leave("a")
        call.back("a")
    record = pool.back.record_event

    def slowly() -> object:
        """While one call notes the end of its reads, the other one is closed."""
        pool.back.record_event = record
        event = record()
        other.close()
        return event

    pool.back.record_event = slowly
    one.close()
    assert len(pool.back.events) == 4
    third = engine.open()
    third.out("a", some(2000))
    assert set(pool.back.events[-2:]) <= set(pool.out.waits)
    waited = len(pool.out.waits)
    third.out("b", some(2000))
    assert len(pool.out.waits) == waited + 1, "for the one that computes, and for no reader twice"
    third.close()


def test_an_interrupted_copy_loses_no_room(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    call = HostEngine(CPU).open()
    with monkeypatch.context() as patch:
        patch.setattr(pool.out, "wait_event", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.out("a", some(1000))
    with pytest.raises(OffloadError, match="host: 1,000 bytes were not copied, because the copy was"):
        call.leave("a")
    call.close()                        # the fixture looks at the room


def test_no_memory_is_an_error_that_names_the_bytes(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(extent: Extent) -> None:
        raise RuntimeError("CUDA error: out of memory")

    call = HostEngine(CPU).open()
    monkeypatch.setattr(pool.room, "_grow", fail)
    with pytest.raises(OffloadError, match=r"host: there is no pinned memory for 9 bytes \(Runtime"):
        call.out("a", some(9))
    assert call.away_bytes == 0
    call.close()


def test_a_forked_child_asks_nothing_of_the_gpu(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = HostEngine(CPU).open()
    call.out("a", some(1000))
    asked = len(pool.out.events), len(pool.back.events)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(OffloadError, match="host: a forked process cannot use data that its parent sent"):
            call.leave("a")
        call.close()
    assert asked == (len(pool.out.events), len(pool.back.events))
    assert pool.room.take(512) == [Extent(1024, 512)], "nothing was given back"
    pool.room.give([Extent(0, 1536)])


def test_nothing_is_asked_of_the_gpu_when_the_interpreter_ends(pool: Any, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    away = HostEngine(CPU).open()
    away.out("a", some(1000))
    asked = len(pool.out.events), len(pool.back.events)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        del away
        gc.collect()
    assert asked == (len(pool.out.events), len(pool.back.events))
    pool.room.give([Extent(0, 1024)])


def test_a_call_that_is_collected_is_closed(pool: Any) -> None:
    away = HostEngine(CPU).open()
    away.out("a", some(1000))
    del away
    gc.collect()
    assert pool.room.take(pool.room.end) == [Extent(0, pool.room.end)]
    pool.room.give([Extent(0, pool.room.end)])
