"""Write docs/versions.md: the whole test suite with every supported release of torch.

``python docs/make_versions.py`` makes one environment after the other in ``.venv-versions``, with the
constraints of ``constraints.txt`` for everything but torch, and runs the tests in it. Name releases to run
only these; the rows of the others stay as they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rkmate.torch_seam import versions
from rkmate.torch_seam.patches import features

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / ".venv-versions"
_HEAD = """# Releases of torch

`make versions` (`docs/make_versions.py`) makes this page: it runs the whole test suite with each release, in
an environment of its own, with the other dependencies of `constraints.txt`. *Features off*: features whose
self test fails (`rkmate/torch_seam/versions.py`, `rkmate/torch_seam/patches/features.py`). If a feature is
off, rkmate warns, or an error says what does not work.

With a release other than 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0, rkmate runs these self tests before it
does anything else. A feature whose test fails is turned off, with a warning. If rkmate cannot work without
that feature, `rkmate.TorchVersionError` names the releases to install.

The rows are of Python 3.11. With torch 2.13.0, the suite was also run with Python 3.12.1 and 3.13.0, where it
passes, and with Python 3.10.13, where all but one test pass (a mixture of experts, with transformers 5.20).
Python 3.14 was not available.

| torch | passed | failed | skipped | features off |
|---|--:|--:|--:|---|
"""
_ROW = re.compile(r"^\| (\d+\.\d+\.\d+) \|.*$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)")


def environment(release: str) -> Path:
    """Return the Python of an environment with a release of torch."""
    folder = FOLDER / release
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pins = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pins.write_text("\n".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]", f"torch=={release}",
                        "-c", pins], check=True)
    return python


def row(release: str) -> str:
    """Run the suite with a release, and return its row of the table."""
    python = environment(release)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    tests = subprocess.run([python, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-q", "tests"],
                           cwd=ROOT, env=one_thread, capture_output=True, text=True, check=False)
    print(tests.stdout[-3000:])
    counts = {kind.rstrip("s") if kind.startswith("error") else kind: int(n)
              for n, kind in _COUNT.findall(tests.stdout.splitlines()[-1])}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    asked = subprocess.run([python, str(Path(__file__)), "--features"], cwd=ROOT, env=one_thread,
                           capture_output=True, text=True, check=True)
    off = asked.stdout.strip().splitlines()[-1]
    return f"| {release} | {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} | {off} |"


def features_off() -> str:
    """Return the features that do not work with the torch of this process."""
    names = [f.name for f in (*versions.NEEDED, *features.FEATURES) if versions.failure(f)]
    return ", ".join(names) or "none"


def main(arguments: list[str]) -> None:
    """Run the releases that are named, all without a name, and write the page."""
    if arguments == ["--features"]:
        print(features_off())
        return
    known = {m[1]: m[0] for m in _ROW.finditer(PAGE.read_text(encoding="utf-8"))} if PAGE.exists() else {}
    for release in arguments or versions.SEEN:
        known[release] = row(release)
        rows = sorted(known, key=lambda v: [int(n) for n in v.split(".")])
        PAGE.write_text(_HEAD + "\n".join(known[v] for v in rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
