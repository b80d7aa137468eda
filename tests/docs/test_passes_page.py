"""The page of the table of passes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_it_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_passes", DOCS / "make_passes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "passes.md").read_text(encoding="utf-8") == module.passes_text(), \
        "run: python docs/make_passes.py"
