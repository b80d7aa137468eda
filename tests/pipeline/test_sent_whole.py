"""Where all that does not fit is copied away for nothing, the options of blocks are not solved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ir.link import Link
from rkmate.pipeline import attempts, prepare
from rkmate.show.plan import Plan
from tests.copying import BUFFERS, LateEngine, use
from tests.options import options_of


def planned(folder: Path, **more: Any) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))
    return rkmate.plan(model, (torch.randn(2048, 32),), progress=False, offload=str(folder),
                       **options_of(costs="analytic", **{"budget": 0.7, **more}))


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    use(monkeypatch, LateEngine())
    own, calls = attempts.solve_lean, []
    monkeypatch.setattr(attempts, "solve_lean", lambda prepared: calls.append(prepared) or own(prepared))
    return calls


def link_is(monkeypatch: pytest.MonkeyPatch, bytes_per_second: float) -> None:
    link = Link(bytes_per_second, bytes_per_second, 0.0, BUFFERS)
    monkeypatch.setattr(prepare, "link_of", lambda *_: link)


def test_a_fast_link_saves_the_options(solved: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                       ) -> None:
    link_is(monkeypatch, 1e18)
    made = planned(tmp_path)
    assert made.schedule.copied and not made.schedule.recomputed() and not solved
    assert made.peak_bytes <= made.budget_bytes
    assert made.step_seconds == pytest.approx(made.baseline_seconds, rel=1e-3)
    assert made.bound_seconds == pytest.approx(made.step_seconds, rel=1e-3)
    made.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").schedule == made.schedule


def test_a_slow_link_does_not(solved: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link_is(monkeypatch, 1.0)
    made = planned(tmp_path)
    assert made.schedule.recomputed() and solved


def test_several_calls(solved: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link_is(monkeypatch, 1e18)
    planned(tmp_path, calls=2, budget=3 * 2**20)
    assert len(solved) == 1
