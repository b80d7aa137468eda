"""The link between a device and a folder, measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rkmate import device
from rkmate.errors import OffloadError, RkmateWarning
from rkmate.measure.step import measure_peak
from rkmate.offload import target as bandwidth
from rkmate.offload.target import measure_link
from tests.device.fake import FakeCopies, FakeDevice, FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore:.* is memory:rkmate.errors.RkmateWarning")
CPU = device.of("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered from test to test, and few bytes are copied."""
    monkeypatch.setattr(bandwidth, "_known", {})
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 2**21)
    monkeypatch.setattr(bandwidth, "FIRST_BYTES", 2**18)
    monkeypatch.setattr(bandwidth, "WIDTH", 16)


def test_it_takes_no_more_memory_than_it_says(tmp_path: Path) -> None:
    engine = CPU.copy_engine(str(tmp_path), 10**7)
    found = measure_peak(lambda: measure_link(CPU, engine))
    link = found.result
    assert min(link.out_bytes_per_second, link.in_bytes_per_second) > 0 < link.seconds_per_copy
    assert (link.place, link.most_bytes, link.buffer_bytes) == (str(tmp_path), 10**7, engine.buffer_bytes)
    assert found.peak <= bandwidth.MOST_BYTES * 5 // 4 + engine.buffer_bytes + 2 * 16 * 16 * 4
    assert found.net == 0
    assert not list(tmp_path.iterdir())


def test_no_more_is_sent_than_may_be(tmp_path: Path) -> None:
    assert measure_link(CPU, CPU.copy_engine(str(tmp_path), 100_000)).most_bytes == 100_000


def test_a_faster_way_is_a_faster_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(call: object, begin: object, out: list[str], back: list[str], compute: object
             ) -> tuple[float, float]:
        size = bandwidth.SMALL_BYTES * 16 if len(out) == bandwidth.SMALL else \
            2**18 if len(out) == 1 else min(2**21, int(2**18 * bandwidth.SECONDS / (0.001 + 2**18 / 1e8)))
        return len(out) * 0.001 + size / 4e8 * (len(out) != bandwidth.SMALL), \
            len(out) * 0.001 + size / 1e8 * (len(out) != bandwidth.SMALL)

    fake = FakeDevice()
    monkeypatch.setattr(fake, "ends_of", ends)
    link = measure_link(fake, fake.copy_engine("host"))
    assert (link.out_bytes_per_second, link.in_bytes_per_second, link.seconds_per_copy) \
        == pytest.approx((4e8, 1e8, 1e-3), rel=1e-3)


@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_what_computing_loses_by_copies_is_known(monkeypatch: pytest.MonkeyPatch, lost: float) -> None:
    clock = [0.0]
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: clock[0])

    def compute() -> None:
        clock[0] += 0.125

    def beside() -> str:
        for _ in range(4):
            pace.compute()
        clock[0] += lost
        return "done"

    pace = bandwidth._Pace(compute)
    assert pace.beside(beside) == pace.beside(beside) == ("done", pytest.approx(lost))


@pytest.mark.parametrize(("cores", "busy", "lost", "taken"), [
    (1, 0.5, 0.2, 0.5), (1, 0.2, 0.5, 0.2), (10_000, 0.5, 0.2, 0.2), (10_000, 0.2, 0.5, 0.2)])
def test_copies_take_what_they_keep_the_processor_busy(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, busy: float, lost: float, taken: float
        ) -> None:
    """But where cores are left for them: there no more than a computation loses."""
    monkeypatch.setattr(bandwidth, "cores", lambda: cores)
    monkeypatch.setattr(bandwidth._Rest, "beside", lambda _, run: (run(), busy))
    monkeypatch.setattr(bandwidth._Pace, "beside", lambda _, run: (run(), lost))
    monkeypatch.setattr(bandwidth, "SECONDS", 1e9)          # no disk is so slow that less is copied
    link = measure_link(CPU, CPU.copy_engine(str(tmp_path)))
    assert link.computing_seconds_per_byte == pytest.approx(taken / (2 * 2**21))


def test_a_rest_costs_what_the_process_computes() -> None:
    def busy() -> str:
        end = bandwidth.time.process_time() + 0.05
        while bandwidth.time.process_time() < end:
            pass
        return "done"

    rest = bandwidth._Rest()
    result, seconds = rest.beside(busy)
    assert result == "done" and seconds >= 0.05
    assert rest.beside(rest.compute)[1] < seconds


def test_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away, cache = tmp_path / "away", tmp_path / "cache"
    away.mkdir()
    link = measure_link(CPU, CPU.copy_engine(str(away)), cache)
    with monkeypatch.context() as patch:
        patch.setattr(bandwidth, "_measured", None)
        assert measure_link(CPU, CPU.copy_engine(str(away)), cache) == link
        bandwidth._known.clear()                            # another process
        assert measure_link(CPU, CPU.copy_engine(str(away), 7), cache).in_bytes_per_second \
            == link.in_bytes_per_second
        with pytest.raises(TypeError):
            measure_link(FakeDevice(), FakeDevice().copy_engine(str(away)), cache)
    file, = (cache / "links").iterdir()
    for content in ("[1, 2, 1]", "[0, 1, 1, 0]", "[1, 1, 1, -1]", "null", '["a", 1, 1, 0]', "[1, NaN, 1, 0]"):
        file.write_text(content)
        bandwidth._known.clear()
        measure_link(CPU, CPU.copy_engine(str(away)), cache)
        assert file.read_text() != content
    file.write_text("[1,")
    bandwidth._known.clear()
    with pytest.warns(RkmateWarning, match="is broken"):
        measure_link(CPU, CPU.copy_engine(str(away)), cache)


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    measure_link(CPU, CPU.copy_engine(str(tmp_path)), tmp_path / "cache")


def test_a_fault_of_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    engine = CPU.copy_engine(str(tmp_path))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OffloadError, match="could not be read"):
        measure_link(CPU, engine)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Each engine that copies, once for each of its calls."""
    found: list[FakeEngine] = []
    real = FakeEngine.open

    def noted(engine: FakeEngine) -> FakeCopies:
        found.append(engine)
        return real(engine)

    monkeypatch.setattr(FakeEngine, "open", noted)
    return found


def test_checksums_are_not_measured(opened: list[FakeEngine]) -> None:
    fake = FakeDevice()
    measure_link(fake, fake.copy_engine("host", verify=True))
    assert opened and not any(engine.verify for engine in opened)
    opened.clear()
    measure_link(fake, fake.copy_engine("host"))
    assert not opened


@pytest.mark.parametrize("remembered", [False, True])
def test_what_few_bytes_tell_is_not_said_of_many(opened: list[FakeEngine], tmp_path: Path, remembered: bool
                                                 ) -> None:
    def asked(most: int | None) -> int:
        """How many calls measuring takes."""
        opened.clear()
        if remembered:
            bandwidth._known.clear()
        link = measure_link(fake, fake.copy_engine("host", most), tmp_path if remembered else None)
        assert link.most_bytes == most and all(engine.most_bytes == most for engine in opened)
        return len(opened)

    fake = FakeDevice()
    assert asked(10_000) > 0 == asked(10_000)
    assert asked(None) > 0 == asked(None) == asked(2**40)
    assert asked(20_000) == 0, "small copies are as fast as large ones, but for what each takes"


def test_a_folder_called_host_is_not_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = bandwidth._key(CPU, "host", 1)
    (tmp_path / "host").mkdir()
    assert bandwidth._key(CPU, "host", 1) == before != bandwidth._key(CPU, str(tmp_path / "host"), 1)
