"""Costs are those of a machine that does nothing else, as near as can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rkmate.measure import costs
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.prepare import prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress


def measured(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: Callable[[int], float],
             passes: int) -> list[float]:
    """Times of all operations by a clock that gains `seconds` of its n-th reading."""
    now, readings = 0.0, 0

    def clock() -> float:
        nonlocal now, readings
        now, readings = now + seconds(readings), readings + 1
        return now

    monkeypatch.setenv("RKMATE_CACHE_DIR", str(folder))
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=clock))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    settings = Settings(measure=MeasureSettings(passes=passes))
    prepared = prepare(trace(model, (torch.randn(4, 8),), {}, settings, Progress(False)))
    monkeypatch.undo()
    return [*[c.time for c in prepared.graph.c], float(readings)]


def test_what_disturbs_one_pass_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    *quiet, readings = measured(monkeypatch, tmp_path / "1", lambda n: 0.25, 1)
    assert max(quiet) == 0.25
    *times, more = measured(monkeypatch, tmp_path / "2", lambda n: 0.25 if n < readings else 0.0625, 2)
    assert more > readings
    assert max(times) == 0.0625


def test_every_run_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    *times, readings = measured(monkeypatch, tmp_path, lambda n: 0.03125 if n % 6 > 2 else 0.015625, 2)
    assert max(times) == 0.015625 and readings > 12
