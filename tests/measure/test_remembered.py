"""Costs on disk: by block, device and settings."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rkmate import device
from rkmate.errors import RkmateWarning
from rkmate.ir.cd import Cost, Kernel
from rkmate.measure.remembered import CostMemory
from rkmate.measure.settings import MeasureSettings
from tests.device.fake import FakeDevice

CPU, SETTINGS = device.of("cpu"), MeasureSettings()
NUMBERS = (Cost(0.5, 0), Cost(0.25, 64, (Kernel(0.125, 128), Kernel(0.0625, 256))))


def test_another_process_finds_them(tmp_path: Path) -> None:
    CostMemory(tmp_path).put("a", CPU, SETTINGS, NUMBERS)
    assert CostMemory(tmp_path).get("a", CPU, SETTINGS, 2) == NUMBERS
    assert CostMemory(None).get("a", CPU, SETTINGS, 2) is None


@pytest.mark.parametrize("key", [
    ("b", CPU, SETTINGS), ("a", FakeDevice(), SETTINGS), ("a", CPU, MeasureSettings(passes=3)),
    ("a", CPU, MeasureSettings(repeats=4)), ("a", CPU, MeasureSettings(enough_seconds=1))])
def test_what_differs_is_another_entry(tmp_path: Path, key: Any) -> None:
    memory = CostMemory(tmp_path)
    memory.put("a", CPU, SETTINGS, NUMBERS)
    assert memory.get(*key, 2) is None


@pytest.mark.parametrize("content", ["[[0.5, 0]]", "[[0.5, 0], [-1, 0]]", "[7, 8]", "{}", "null"])
def test_an_edited_entry_counts_as_none(tmp_path: Path, content: str) -> None:
    CostMemory(tmp_path).put("a", CPU, SETTINGS, NUMBERS)
    path, = (tmp_path / "costs").iterdir()
    path.write_text(content)
    assert CostMemory(tmp_path).get("a", CPU, SETTINGS, 2) is None


def test_a_truncated_entry_warns(tmp_path: Path) -> None:
    CostMemory(tmp_path).put("a", CPU, SETTINGS, NUMBERS)
    path, = (tmp_path / "costs").iterdir()
    path.write_text("[[0.5, ")
    with pytest.warns(RkmateWarning, match="is broken"):
        assert CostMemory(tmp_path).get("a", CPU, SETTINGS, 2) is None


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    memory = CostMemory(tmp_path)
    memory.put("a", CPU, SETTINGS, NUMBERS)
    assert memory.get("a", CPU, SETTINGS, 2) == NUMBERS, "in memory"
    assert os.listdir(tmp_path / "costs") == []
