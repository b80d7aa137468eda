"""Train every architecture of the bank and write the table in the docs.

Usage: python -m tests.architectures.make_table docs/architectures.md
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import transformers

import rkmate
from tests.architectures.bank import ARCHITECTURES, Architecture
from tests.architectures.test_architectures import train

_HEAD = """# Public architectures

Each architecture of the transformers library ({version}) below was built from a small configuration with
random weights, wrapped, and trained for two steps on random data, at its own peak and at 0.6 of it (or at
its smallest feasible budget, where that is more). Output, loss, every gradient, every buffer and the
random state were equal to eager mode's, bit for bit; the measured peak was within the budget. The
figures are predicted bytes of the step and the share of eager's they are. Made by
`python -m tests.architectures.make_table docs/architectures.md`.

| architecture | subject | own peak, bytes | budgeted peak, bytes | share | result |
| --- | --- | ---: | ---: | ---: | --- |
"""


def row(architecture: Architecture) -> str:
    """One architecture's line."""
    start = f"| {architecture.name} | {architecture.subject} "
    try:
        plans = [train(architecture, fraction).plan for fraction in (1.0, 0.6)]
    except (rkmate.RkmateError, AssertionError) as error:
        text = " ".join(str(error).split()).replace("|", "/")
        prefix = str(Path(transformers.__file__).parent.parent)
        return f"{start}| | | | {type(error).__name__}: {text.replace(prefix + '/', '')} |"
    own, less = (p.peak_bytes for p in plans)
    return f"{start}| {own:,} | {less:,} | {less / own:.0%} | pass |"


def main(path: str) -> None:
    """Write the table as it grows, so that a broken run leaves what it has found."""
    warnings.simplefilter("ignore")
    text = _HEAD.format(version=transformers.__version__)
    for architecture in ARCHITECTURES:
        line = row(architecture)
        print(line, flush=True)
        text += line + "\n"
        Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
