"""Write docs/checks.md from the tests' own tables: ``python docs/make_checks.py``.

Each bad input is tried and the error that it gets is written down; the slopes of losses with random
operations are measured against the gradients.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rkmate  # noqa: E402
from tests.semantics.slopes import KINDS, largest_gap, with_three_budgets  # noqa: E402
from tests.semantics.test_bad_inputs import TABLE  # noqa: E402

PAGE = Path(__file__).parent / "checks.md"


def errors() -> list[str]:
    """One line for each bad input."""
    lines = ["| input | error | message |", "| --- | --- | --- |"]
    for name, (_, _, call) in TABLE.items():
        try:
            call()
        except rkmate.RkmateError as error:
            text = " ".join(str(error).split()).replace("|", "/").replace(f"{ROOT}/", "")
            lines.append(f"| {name} | `{type(error).__name__}` | {text} |")
    return lines


def slopes() -> list[str]:
    """One line for each random operation."""
    lines = ["| operation | at its own peak | halfway | at the smallest budget |",
             "| --- | ---: | ---: | ---: |"]
    for kind in KINDS:
        cells = " | ".join(f"{gap:.1e}" for gap in largest_gap(*with_three_budgets(kind)))
        lines.append(f"| {kind.__name__} | {cells} |")
    return lines


def main() -> None:
    """Write the page."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        "# Errors and slopes, as tested", "",
        "`python docs/make_checks.py` makes this page from the tables of the tests.", "",
        f"## {len(TABLE)} bad inputs", "",
        "The error that each input raises (`tests/semantics/test_bad_inputs.py`):", "", *errors(), "",
        "## Gradients against finite differences", "",
        "Each operation is between two linear layers, in float64. The wrapped module's "
        "gradients, in a random direction of each parameter, are compared with central "
        "differences of its loss with the same seed, over three training steps at each "
        "of three budgets. The table shows the largest relative difference "
        "(`tests/semantics/test_randomness.py` fails above 1e-5):", "", *slopes(), ""]
    PAGE.write_text("\n".join(lines), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
