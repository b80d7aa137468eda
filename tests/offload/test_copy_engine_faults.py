"""What goes wrong on the way to a folder and back: an error that names it, and the next call works."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkmate import device as devices
from rkmate.errors import ArgumentError, OffloadError, RkmateWarning
from rkmate.offload import disk as away_file
from rkmate.offload.protocol import CopyEngine
from tests.offload.test_copy_engine import files, same, some, there_and_back

pytestmark = pytest.mark.filterwarnings("ignore:.* is memory:rkmate.errors.RkmateWarning")
CPU = devices.of("cpu")
MIB = 2**20


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))
    return fail


def test_a_folder_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("missing", "No such file"), ("file", "Not a directory")):
        with pytest.raises(ArgumentError, match=rf"offload is '.*{name}', .*{why}.*: give an existing"):
            CPU.copy_engine(str(tmp_path / name))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
                                         ) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite" if number == errno.ENOSPC else "open", failing(number))
        with pytest.raises(ArgumentError, match=os.strerror(number)):
            CPU.copy_engine(str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert not files(tmp_path)


def test_a_full_disk(engine: CopyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(OffloadError, match=rf"{tmp_path}: there is no room for 3,000,000 bytes \(No"):
            call.out("a", some(3_000_000))
    call.out("a", some(3_000_000))
    call.close()


def test_a_file_system_that_cannot_reserve_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CPU.copy_engine(str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    assert same(there_and_back(engine, some(MIB)), some(MIB))
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    call = engine.open()
    call.out("a", some(5))
    with pytest.raises(OffloadError, match=rf"{tmp_path}: 5 bytes could not be written \(No space"):
        call.leave("a")


def test_an_error_of_the_disk(engine: CopyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine.open()
    call.out("good", some(3 * MIB))
    call.leave("good")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.EIO))
        patch.setattr(os, "preadv", failing(errno.EIO))
        call.out("bad", some(3 * MIB))
        for _ in range(2):
            with pytest.raises(OffloadError, match=rf"{tmp_path}: 3,145,728 bytes could not be written \(In"):
                call.leave("bad")
        call.back("good")
        for _ in range(2):
            with pytest.raises(OffloadError, match=rf"{tmp_path}: 3,145,728 bytes could not be read \(Input"):
                call.arrive("good")
    call.close()


def test_a_file_that_ends_early(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine.open()
    call.out("a", some(MIB))
    call.leave("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        call.back("a")
        with pytest.raises(OffloadError, match=r"1,048,576 bytes could not be read \(only 0 bytes of"):
            call.arrive("a")
    call.close()


def test_short_reads_and_writes_go_on(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read, calls = os.pwrite, os.preadv, []

    def short_write(fd: int, view: memoryview, offset: int) -> int:
        calls.append("out")
        return min(write(fd, view[:200 * 4096], offset), 5000 + 4096 * 100)

    def short_read(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append("in")
        return min(read(fd, [views[0][:200 * 4096]], offset), 5000 + 4096 * 100)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    assert same(there_and_back(engine, some(3 * MIB + 7)), some(3 * MIB + 7))
    assert min(calls.count("in"), calls.count("out")) > 6


def test_a_slow_disk_is_waited_for(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda *a: (time.sleep(0.005), write(*a))[1])
    monkeypatch.setattr(os, "preadv", lambda *a: (time.sleep(0.005), read(*a))[1])
    call = engine.open()
    for k in range(3):
        call.out(str(k), some(MIB + 9, k))
    for k in range(3):
        call.leave(str(k))
    found = [call.back(str(k)) for k in range(3)]
    for k in range(3):
        call.arrive(str(k))
        assert same(found[k], some(MIB + 9, k))
    call.close()


def test_what_comes_back_wrong_is_seen(engine: CopyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                       ) -> None:
    read = os.preadv

    def wrong(fd: int, views: list[memoryview], offset: int) -> int:
        done = read(fd, views, offset)
        views[0][99] ^= 1
        return done

    call = engine.open()
    call.out("a", some(4096))
    call.leave("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", wrong)
        call.back("a")
        with pytest.raises(OffloadError, match=rf"{tmp_path}: some of 4,096 bytes differ from those"):
            call.arrive("a")
    tensor = some(4096)
    patch.setattr(os, "pwrite", lambda fd, view, offset: len(view))     # nothing is written
    call.out("b", tensor.flip(0))
    call.leave("b")
    patch.undo()
    call.back("b")
    with pytest.raises(OffloadError, match="differ from those that were sent"):
        call.arrive("b")
    call.close()


def test_a_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    folder.mkdir()
    engine = CPU.copy_engine(str(folder))
    call = engine.open()
    call.out("a", some(MIB))
    shutil.rmtree(folder)
    call.leave("a")
    found = call.back("a")
    call.arrive("a")
    assert same(found, some(MIB))
    call.close()
    assert same(there_and_back(engine, some(5 * MIB)), some(5 * MIB))
    with pytest.raises(ArgumentError, match="No such file"):
        CPU.copy_engine(str(folder))


class Gate:
    """Holds writes and reads up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.open = threading.Event(), threading.Event()
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(os, name, self._behind(getattr(os, name)))

    def _behind(self, call: Callable[..., int]) -> Callable[..., int]:
        def waits(*args: object) -> int:
            self.held.set()
            assert self.open.wait(60)
            return call(*args)
        return waits


def interrupted(monkeypatch: pytest.MonkeyPatch, call: Callable[[str], None], key: str) -> None:
    """Ctrl-C while a call waits."""
    def wait(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            call(key)


def test_ctrl_c_while_waiting(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine.open()
    call.out("a", some(MIB))
    interrupted(monkeypatch, call.leave, "a")
    call.leave("a")                                 # who goes on finds all as it was
    found = call.back("a")
    interrupted(monkeypatch, call.arrive, "a")
    call.arrive("a")
    assert same(found, some(MIB))
    call.out("b", some(MIB))
    call.back("a")
    interrupted(monkeypatch, call.leave, "b")
    call.close()


def test_memory_lives_until_nobody_writes_it(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine.open()
    call.out("a", some(MIB))
    call.leave("a")
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        found = call.back("a")
        call.out("b", some(2 * MIB))
        assert gate.held.wait(60)
        closing = threading.Thread(target=call.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        gate.open.set()
        closing.join()
    assert found.untyped_storage().nbytes() == MIB
    interrupt_free = engine.open()
    interrupt_free.close()


def test_an_interrupted_close_is_done_again(engine: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    call = engine.open()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        gate = Gate(patch)
        call.out("a", some(2 * MIB))
        assert gate.held.wait(60)
        patch.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.close()
        patch.undo()
        gate.open.set()
    call.close()


def test_a_folder_in_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away_file, "_kind", lambda folder: "tmpfs")
    with pytest.warns(RkmateWarning, match=rf"{tmp_path} is memory \(tmpfs\), not a disk"):
        engine = CPU.copy_engine(str(tmp_path))
    assert same(there_and_back(engine, some(9999)), some(9999))


def test_memory_that_refuses_direct_writes_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = away_file._nameless
    monkeypatch.setattr(away_file, "_kind", lambda folder: "tmpfs")
    monkeypatch.setattr(away_file, "_nameless",
                        lambda folder, direct: None if direct else nameless(folder, 0))
    with pytest.warns(RkmateWarning) as told:
        engine = CPU.copy_engine(str(tmp_path))
    assert ["is memory (tmpfs), not a disk" in str(t.message) for t in told] == [True]
    assert same(there_and_back(engine, some(9999)), some(9999))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder that is memory")
def test_the_kind_of_a_file_system_is_known(tmp_path: Path) -> None:
    assert away_file._kind(Path("/dev/shm")) == "tmpfs"


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "rkmate-123-0a1b2c3d.away").touch()         # killed between making it and taking its name
    (tmp_path / "mine.away").touch()
    CPU.copy_engine(str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["mine.away"]


PROCESS = textwrap.dedent("""
    import os, resource, sys, time
    import torch
    from rkmate import device as devices
    from rkmate.errors import OffloadError

    folder = sys.argv[1]
    engine = devices.of("cpu").copy_engine(folder, verify=True)

    def some(size, value):
        return torch.full((size,), value, dtype=torch.uint8)

    def step(value):
        call = engine.open()
        call.out("a", some(2**21, value))
        call.leave("a")
        found = call.back("a")
        call.arrive("a")
        call.close()
        return torch.equal(found, some(2**21, value))
""")


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}       # more do not outlive a fork, and torch waits
    return subprocess.Popen([sys.executable, "-c", PROCESS + textwrap.dedent(program), str(folder)],
                            cwd=Path(__file__).parents[2], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_forked_child_has_a_file_of_its_own_and_a_killed_process_leaves_nothing(
        engine: CopyEngine, tmp_path: Path) -> None:
    process = start("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)     # of threads beside a fork
        call = engine.open()
        call.out("a", some(2**21, 7))
        call.leave("a")
        call.out("b", some(2**24, 8))                           # under way
        files = lambda: sum(folder in os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd")
                            if os.path.lexists(f"/proc/self/fd/{f}"))
        child = os.fork()
        if not child:
            assert files() == 0
            try:
                call.leave("b")
            except OffloadError as error:
                assert "not a forked child's" in str(error)
            call.close()
            assert all(step(k) for k in range(3))
            assert files() == 1
            sys.exit(5)
        assert all(step(k) for k in range(3))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        call.leave("b")
        for key, size, value in (("a", 2**21, 7), ("b", 2**24, 8)):
            found = call.back(key)
            call.arrive(key)
            assert torch.equal(found, some(size, value))
        assert files() == 1
        call.close()

        resource.setrlimit(resource.RLIMIT_FSIZE, (2**25, 2**25))
        call = engine.open()
        call.out("a", some(2**21, 1))
        call.leave("a")
        try:
            call.out("b", some(2**26, 1))
        except OffloadError as error:
            print(error, flush=True)
        call.out("c", some(2**24, 1))
        time.sleep(60)
    """, tmp_path)
    assert process.stdout is not None
    told = process.stdout.readline()
    assert same(there_and_back(engine, some(2**22)), some(2**22))       # two processes do not meet
    process.send_signal(signal.SIGKILL)
    errors = process.communicate()[1]
    assert told == f"{tmp_path}: there is no room for 67,108,864 bytes (File too large)\n"
    assert not errors or away_file._kind(tmp_path), errors      # memory is told once by each process
    assert not list(tmp_path.iterdir())
