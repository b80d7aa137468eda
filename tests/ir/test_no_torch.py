"""The algorithms start without torch, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("names", [
    "errors", "ir.cd ir.chain ir.schedule ir.simulate ir.recompute ir.gradients", "ilp", "rotor",
    "planners"])
def test_no_torch(names: str) -> None:
    imports = "; ".join(f"import rkmate.{name}" for name in names.split())
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
