"""What is short runs often, what is long once or twice, all within a share of a step."""

from __future__ import annotations

from collections import Counter

import pytest

from rkmate.measure import runs
from rkmate.measure.runs import Timings, runs_within
from rkmate.measure.settings import MeasureSettings
from tests.device.fake import FakeDevice


def test_all_run_often_where_there_is_time() -> None:
    assert runs_within({"a": 0.1, "b": 0.2}, 2.0, 6) == {"a": 6, "b": 6}


def test_what_is_long_runs_less() -> None:
    found = runs_within({"long": 1.0, "short": 0.01, "middle": 0.3}, 3.0, 6)
    assert found == {"short": 6, "middle": 4, "long": 1}


def test_nothing_runs_without_time() -> None:
    assert runs_within({"a": 1.0, "b": 2.0}, -5.0, 6) == {"a": 0, "b": 0}
    assert runs_within({}, 1.0, 6) == {}


@pytest.mark.parametrize("allowance", [0.5, 3.0, 40.0, 1000.0])
def test_the_allowance_is_kept(allowance: float) -> None:
    seconds = {k: 0.001 * 1.5**k for k in range(24)}
    found = runs_within(seconds, allowance, 6)
    assert sum(seconds[k] * n for k, n in found.items()) <= allowance * (1 + 1e-9)
    assert list(found.values()) == sorted(found.values(), reverse=True) or allowance == 1000.0
    assert max(found.values()) == 6


def _time(timings: Timings, number: int, repeats: int) -> None:
    """Time an operation in a pass, as often as is wanted."""
    for walk in range(number * repeats, (number + 1) * repeats):
        timings.start_walk(walk)
        if timings.wanted("op"):
            timings.time(lambda: None, "op")
            assert not timings.wanted("op")


def _runs(monkeypatch: pytest.MonkeyPatch, seconds: float, step: float, often: int = 1) -> list[int]:
    """Timed runs in each pass of one operation that takes so long."""
    clock = iter(range(1000))
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(clock) * seconds)
    counts = []
    with FakeDevice(seconds=lambda n: seconds) as device:
        timings = Timings(device, MeasureSettings(repeats=3, enough_seconds=1e9))
        timings.clock(lambda: None, "op")
        timings.share(step, Counter(op=often))
        for number in range(2):
            before = device.calls
            _time(timings, number, 3)
            counts.append(device.calls - before)
        assert timings.seconds("op") == seconds
    return counts


def test_runs_are_dealt_out_to_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _runs(monkeypatch, 0.25, 1.0) == [3, 3]          # three seconds are there in any case
    assert _runs(monkeypatch, 1.0, 0.0) == [2, 1]
    assert _runs(monkeypatch, 10.0, 60.0) == [1, 0]         # and the first run, for its memory
    assert _runs(monkeypatch, 10.0, 10.0) == [0, 0]


def test_what_takes_little_of_a_step_runs_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _runs(monkeypatch, 0.001, 1.0) == [1, 1]
    assert _runs(monkeypatch, 0.001, 1.0, often=12) == [3, 3]


@pytest.mark.parametrize(("passes", "seconds", "counts"), [
    (2, (9.0, 3.0, 8.0, 1.0, 2.0, 4.0), 3.0), (2, (1.0, 90.0), 1.0), (1, (5.0, 1.0, 2.0), 2.0),
    (1, (7.0,), 7.0)])
def test_the_median_of_all_passes_counts(passes: int, seconds: tuple[float, ...], counts: float) -> None:
    settings = MeasureSettings(passes=passes, repeats=len(seconds) // passes, enough_seconds=1e9)
    with FakeDevice(seconds=lambda n: seconds[n]) as device:
        timings = Timings(device, settings)
        timings.clock(lambda: None, "op")               # which counts only where nothing is timed
        for number in range(passes):
            _time(timings, number, settings.repeats)
        assert timings.seconds("op") == counts
