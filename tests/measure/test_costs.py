"""Costs are those of a machine that does nothing else, as near as can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rkmate.device.fake import FakeDevice
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.prepare import Prepared, prepare
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is remembered."""
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path))


def measured(seconds: Callable[[int], float], **settings: float) -> tuple[list[float], FakeDevice, Prepared]:
    """Times of all operations on a device whose n-th timed call takes `seconds`."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    with FakeDevice(seconds=seconds) as device:
        prepared = prepare(model, (torch.randn(4, 8),), {},
                           Settings(measure=MeasureSettings(**settings)),  # type: ignore[arg-type]
                           Progress(False))
    return [c.time for c in prepared.graph.c], device, prepared


def test_what_disturbs_one_pass_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet, first, _ = measured(lambda n: 0.25, passes=1)
    assert max(quiet) == 0.25
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "2"))
    times, device, _ = measured(lambda n: 0.25 if n < first.calls else 0.0625, passes=2)
    assert device.calls > first.calls
    assert max(times) == 0.0625


def test_every_run_counts() -> None:
    times, device, _ = measured(lambda n: 0.03125 if n % 3 else 0.015625, passes=2)
    assert max(times) == 0.015625 and device.calls > 6


def test_what_takes_long_is_not_repeated() -> None:
    _, often, _ = measured(lambda n: 0.03, passes=1, repeats=3)
    _, once, _ = measured(lambda n: 0.03, passes=1, repeats=3, enough_seconds=0.02)
    assert often.calls == 3 * once.calls


def test_other_settings_measure_anew() -> None:
    """Else a first, noisy measurement would stand for good."""
    noisy, _, _ = measured(lambda n: 0.5, passes=1)
    again, device, _ = measured(lambda n: 0.25, passes=1)
    assert again == noisy and device.calls == 0
    better, device, _ = measured(lambda n: 0.25, passes=3)
    assert max(better) == 0.25 and device.calls > 0


def test_another_device_measures_anew() -> None:
    first, _, prepared = measured(lambda n: 0.5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    with FakeDevice(seconds=lambda n: 0.25, name="a newer one"):
        other = prepare(model, (torch.randn(4, 8),), {}, Settings(), Progress(False))
    assert max(c.time for c in other.graph.c) == 0.25 < max(first)
    assert other.fingerprint == prepared.fingerprint


def test_an_accelerators_rounding_and_counters() -> None:
    times, device, prepared = measured(lambda n: 0.5, passes=2)
    made = {j for c in prepared.graph.c for j in c.outputs}
    assert {prepared.graph.d[j].size for j in made} == {512}         # of 4 x 8 and of 8 floats
    classes = dict(zip(prepared.classes, prepared.partition.blocks, strict=True))
    assert device.statistics.resets == sum(len(b.c) for b in classes.values()), "once for each part"
    assert device.statistics.allocated() == 0
    assert [c.overhead for c in prepared.graph.c] == [0] * len(times)
