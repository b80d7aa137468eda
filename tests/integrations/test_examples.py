"""The scripts of the tools that people train with, as a user starts them: what they train, save, load and
evaluate is what they do without a budget, and a step is measured within it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOOLS = ("accelerate", "lightning", pytest.param("diffusers", marks=pytest.mark.slow))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning",
                                        "ignore::DeprecationWarning", "error::rkmate.RkmateWarning")


@pytest.mark.parametrize("tool", TOOLS)
def test_the_same_within_a_budget(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(tool)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    name = f"trainer_{tool}"
    try:
        main = importlib.import_module(name).main
        plain = main(True)
        said = capsys.readouterr().out
        planned = main(False)
    finally:
        sys.modules.pop(name, None)
    measured, _, same = capsys.readouterr().out.partition("\n")
    assert same == said, "losses, and what the loaded model says"
    found = re.fullmatch(r"([\d,]+) bytes measured in a budget of ([\d,]+) \(([\d,]+) without\)", measured)
    assert found is not None, measured
    peak, budget, without = (int(n.replace(",", "")) for n in found.groups())
    assert peak <= budget < without
    for (name, a), (other, b) in zip(plain.named_parameters(), planned.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
