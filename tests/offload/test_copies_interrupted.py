"""Ctrl-C, forks, the end of the process and the collector of garbage, in the middle of copies to a folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rkmate import device as devices
from rkmate.errors import OffloadError
from rkmate.offload import disk as away_file
from rkmate.offload.copies import Extent
from rkmate.offload.protocol import CopyEngine
from tests.offload.test_copy_engine import files, same, some, there_and_back
from tests.offload.test_copy_engine_faults import Gate

pytestmark = pytest.mark.filterwarnings("ignore:.* is memory:rkmate.errors.RkmateWarning")
CPU = devices.of("cpu")
MIB = 2**20
SECONDS = 60
"""So long a test waits for a thread before it fails."""


class Interrupted:
    """A lane's lock; Ctrl-C comes when somebody waits for it first."""

    def __init__(self, lane: Any, gate: Gate) -> None:
        self.lane, self.lock, self.gate = lane, lane.working, gate

    def acquire(self) -> bool:
        self.lane.working = self.lock
        self.gate.open.set()
        raise KeyboardInterrupt

    def release(self) -> None:
        self.lock.release()


def test_ctrl_c_while_the_collector_closes_a_call(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    """Its memory goes right after that: no thread may be at it any more."""
    call, gate, interrupts = engine.open(), Gate(monkeypatch), [KeyboardInterrupt()]
    transfers = engine._file.lanes._lanes  # type: ignore[attr-defined]

    def interrupt(_: float) -> None:
        gate.open.set()
        if interrupts:
            raise interrupts.pop()

    call.out("a", some(2 * MIB))
    assert gate.held.wait(SECONDS)
    monkeypatch.setattr(time, "sleep", interrupt)
    del call
    assert not interrupts
    assert all(lane.transfer is None for lane in transfers)


def test_ctrl_c_while_a_fork_waits_for_the_threads(engine: CopyEngine, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    file, call = away_file.shared(tmp_path), engine.open()
    gate = Gate(monkeypatch)
    call.out("a", some(MIB))
    assert gate.held.wait(SECONDS)
    lane = next(lane for lane in file.lanes._lanes if lane.transfer is not None)
    lane.working = Interrupted(lane, gate)              # type: ignore[assignment]
    held = []
    # What these raise, Python forgets.
    with contextlib.suppress(KeyboardInterrupt):
        away_file._before_fork()
    looking = threading.Thread(target=lambda: held.extend(
        k for k in file.lanes._lanes if not k.working.acquire(blocking=False)))
    looking.start()
    looking.join()
    with contextlib.suppress(RuntimeError):
        away_file._in_parent()
    assert len(held) == 4, "no thread wrote while the fork was made"
    assert away_file._lock.acquire(timeout=SECONDS)
    away_file._lock.release()
    assert call._away["a"].moving.over.wait(SECONDS)    # type: ignore[attr-defined]
    call.leave("a")
    call.close()
    assert same(there_and_back(engine, some(MIB + 5)), some(MIB + 5))


def test_who_holds_nothing_lets_go_of_nothing(engine: CopyEngine, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fork before which something else went wrong."""
    call, gate = engine.open(), Gate(monkeypatch)
    call.out("a", some(MIB))
    assert gate.held.wait(SECONDS)
    away_file.shared(tmp_path).lanes.resume()
    gate.open.set()
    assert call._away["a"].moving.over.wait(SECONDS)    # type: ignore[attr-defined]
    call.leave("a")
    call.close()


def test_ctrl_c_while_a_checksum_is_made_loses_no_room(engine: CopyEngine, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: int) -> int:
        raise KeyboardInterrupt

    call, room = engine.open(), away_file.shared(tmp_path).room
    with monkeypatch.context() as patch:
        patch.setattr(away_file, "checksum", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.out("a", some(3 * MIB))
    for use in (call.leave, call.back):
        with pytest.raises((OffloadError, ValueError), match=r"interrupted|has not left"):
            use("a")
    call.close()
    assert room.end >= 3 * MIB and room.take(room.end) == [Extent(0, room.end)]


def test_who_trains_while_the_process_ends_gets_an_error(tmp_path: Path) -> None:
    call = CPU.copy_engine(str(tmp_path)).open()
    call.out("a", some(MIB))
    call.leave("a")
    file = away_file.shared(tmp_path)
    file.room.give(file.room.take(MIB))
    file.closing()                                      # as at exit
    with pytest.raises(OffloadError, match=rf"{tmp_path}: 5 bytes could not be copied .* process does"):
        call.out("b", some(5))
    with pytest.raises(OffloadError, match=rf"{tmp_path}: 1,048,576 bytes could not be copied"):
        call.back("a")
    call.close()
    assert not files(tmp_path)


class Late:
    """A queue in whose way the end of the process comes."""

    def __init__(self, queue: SimpleQueue[Any], end: threading.Thread) -> None:
        self.queue, self.end = queue, end

    def put(self, chunk: object) -> None:
        if not self.end.ident:
            self.end.start()
            self.end.join(0.2)
        self.queue.put(chunk)


def test_no_copy_comes_after_the_end_of_a_queue(tmp_path: Path) -> None:
    engine = CPU.copy_engine(str(tmp_path))
    lanes, call = away_file.shared(tmp_path).lanes, engine.open()
    end = threading.Thread(target=lanes.stop, daemon=True)
    lanes.out = Late(lanes.out, end)                    # type: ignore[assignment]
    call.out("a", some(3 * MIB))
    end.join(SECONDS)
    assert not end.is_alive()
    assert call._away["a"].moving.over.wait(SECONDS)    # type: ignore[attr-defined]
    with contextlib.suppress(OffloadError):             # it may have been moved still
        call.leave("a")
    call.close()


def test_a_call_that_is_collected_in_a_thread_that_copies(engine: CopyEngine, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    call, write, where = engine.open(), os.pwrite, []
    tensor = some(3 * MIB)      # the same both times: how much room it takes depends on where it begins

    def closing(*args: Any) -> int:
        where.append(threading.current_thread())
        call.close()
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", closing)
        call.out("a", tensor)
        for sent in call._away.values():                # type: ignore[attr-defined]
            sent.moving.over.wait()
    while not where:
        time.sleep(0.001)
    assert threading.current_thread() not in where
    file = away_file.shared(tmp_path)
    while not file._abandoned:
        time.sleep(0.001)
    end = file.room.end
    engine.open().close()
    assert not file._abandoned
    other = engine.open()
    other.out("a", tensor)
    assert file.room.end == end         # its room was given back
    other.close()


def test_what_a_copying_thread_collected_is_freed_when_another_call_ends(
        engine: CopyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other, call, write = away_file.shared(tmp_path), engine.open(), engine.open(), os.pwrite

    def closing(*args: Any) -> int:
        call.close()
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", closing)
        call.out("a", some(MIB))
        until = time.monotonic() + SECONDS
        while not file._abandoned and time.monotonic() < until:
            time.sleep(0.001)
    assert file._abandoned
    other.close()
    assert not file._abandoned
    assert file.room.take(file.room.end) == [Extent(0, file.room.end)]


def test_what_is_abandoned_stays_until_it_is_freed(engine: CopyEngine, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while somebody waits for the threads that still write there."""
    file = away_file.shared(tmp_path)
    file.abandon(away_file.Abandoned([], file.room.take(4096), None))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(file.lanes, "without", interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.sweep()
    assert file._abandoned
    engine.open().close()
    assert not file._abandoned
