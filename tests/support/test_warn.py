"""Warnings name the line of the caller, wherever in the package they arise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rkmate
from rkmate.device import cpu
from rkmate.pipeline import attempts
from rkmate.pipeline import search as planning
from rkmate.pipeline.prepare import prepare
from rkmate.pipeline.solve import solve

X = torch.randn(4, 8)


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda *_: None)
    return model


def _wrapped_hooked() -> None:
    rkmate.wrap(_hooked(), (X,), budget=1.0, progress=False)


def _curve_of_hooked() -> None:
    rkmate.tradeoff(_hooked(), (X,), budgets=[1.0], progress=False)


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 24), nn.Linear(24, 500, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(ids).relu()), ids)


def _least(ids: torch.Tensor) -> int:
    with pytest.raises(rkmate.InfeasibleBudget) as info:
        rkmate.plan(_Head(), (ids,), budget=1, progress=False)
    return info.value.minimum_bytes


def _split_head() -> None:
    ids = torch.arange(256)
    rkmate.wrap(_Head(), (ids,), budget=_least(ids), progress=False)


def _curve_of_split_head() -> None:
    ids = torch.arange(256)
    rkmate.tradeoff(_Head(), (ids,), budgets=[_least(ids)], progress=False)


def _another_flag() -> None:
    model = rkmate.wrap(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), (X,), budget=1.0, progress=False,
                        settings=rkmate.Settings(run=rkmate.RunSettings(on_new_shape="original")))
    nn.Sequential(model.eval())(X)         # through torch's own frames


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).relu(), self.b(x).tanh()


def _another_loss() -> None:
    model = rkmate.wrap(_Two(), (X,), budget=1.0, progress=False)
    model(X)[0].sum().backward()


def _no_cache() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU()) for _ in range(6)))
    rkmate.wrap(model, (X,), budget=0.8, progress=False)


@pytest.mark.parametrize(("warning", "act"), [
    ("has forward hooks", _wrapped_hooked), ("has forward hooks", _curve_of_hooked),
    ("a few rows at a time", _split_head), ("a few rows at a time", _curve_of_split_head),
    ("the original module runs", _another_flag), ("runs a second time", _another_loss),
    ("cannot be written", _no_cache)])
def test_names_the_callers_line(warning: str, act: Callable[[], None], tmp_path: Path,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PART_BYTES", 2**13)
    monkeypatch.setattr(planning, "prepare", prepare)       # not through a line of the tests
    monkeypatch.setattr(attempts, "solve_lean", solve)
    if act is _no_cache:
        (tmp_path / "file").touch()
        monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.warns(rkmate.RkmateWarning, match=warning) as caught:
        act()
    first = act.__code__.co_firstlineno
    last = max(line for _, _, line in act.__code__.co_lines() if line)
    for w in caught:
        if issubclass(w.category, rkmate.RkmateWarning):
            assert w.filename == __file__
            assert first < w.lineno <= last
