"""The examples train inside their budgets with eager's gradients, at small sizes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES: dict[str, dict[str, int]] = {
    "dtr_treelstm": {"width": 16, "batch": 256, "leaves": 10},
    "dtr_language_model": {"words": 30, "width": 16, "batch": 128, "length": 10},
    "dtr_maml": {"width": 16, "batch": 512, "inner": 4},
    "dtr_routing": {"width": 16, "rows": 1024, "layers": 3},
}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("dtr_"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_example(name: str) -> None:
    compare: Any = importlib.import_module("dtr_compare").compare
    task = importlib.import_module(name).task(**SIZES[name])
    for row in compare(task, (1.0, 0.7), steps=2, heuristic="dtr", overhead_limit=1000):
        assert row.equal
        assert row.peak_over_budget <= 1
        if row.ratio < 1:
            assert row.evictions > 0
