"""Train every architecture of the bank and write the table in the docs.

Usage: python -m tests.architectures.make_table docs/architectures.md [NAME ...]

Lines that the file has stay as they are, unless their architecture is named: a run that was stopped
goes on where it was. Without the file, all are run.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import transformers

import rkmate
from tests.architectures.bank import ARCHITECTURES, BY_NAME, INPUTS, Architecture
from tests.architectures.test_architectures import train

_HEAD = """# Public architectures

Each architecture of the transformers library ({version}) below was built from a small configuration with
random weights, wrapped, and trained for two steps on random data, at its own peak and at 0.6 of it (or at
its smallest feasible budget, where that is more). `pass`: output, loss, every gradient, every buffer and
the random state were equal to eager mode's, bit for bit, and the measured peak was within the budget, and
within 2% of the predicted one. Anything else is the error that a user gets. The figures are predicted
bytes of the step, and the share of its own peak that the budgeted step takes. Made by
`python -m tests.architectures.make_table docs/architectures.md`.

{passing} of {count} pass.

| architecture | subject | own peak, bytes | budgeted peak, bytes | share | result |
| --- | --- | ---: | ---: | ---: | --- |
"""
_CONFIGURATIONS = """
## Configurations

What is not named has the library's default. Inputs are random, in train mode.

| architecture | model | inputs |
| --- | --- | --- |
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


def configuration(architecture: Architecture) -> str:
    """One architecture's line in the table of configurations."""
    options = ", ".join(f"{k}={v!r}" for k, v in architecture.options.items()).replace("|", "/")
    inputs = ", ".join(f"{k} {list(v.shape)}" if isinstance(v, torch.Tensor) else f"{k}={v!r}"
                       for k, v in INPUTS[architecture.inputs]().items())
    return (f"| {architecture.name} | `{architecture.model}({architecture.config}({options}))` "
            f"| {inputs} |")


def written(path: Path) -> dict[str, str]:
    """The lines that the file has, by architecture."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").partition("## Configurations")[0].splitlines()
    found = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    return {name: line for name, line in found.items() if name in BY_NAME}


def main(path: Path, again: list[str]) -> None:
    """Write the table as it grows, so that a broken run leaves what it has found."""
    warnings.simplefilter("ignore")
    rows = {name: line for name, line in written(path).items() if name not in again}
    for architecture in ARCHITECTURES:
        if architecture.name in rows:
            continue
        rows[architecture.name] = row(architecture)
        print(rows[architecture.name], flush=True)
        path.write_text(page(rows), encoding="utf-8")
    path.write_text(page(rows), encoding="utf-8")


def page(rows: dict[str, str]) -> str:
    """The page with the lines that there are."""
    done = [a for a in ARCHITECTURES if a.name in rows]
    lines = [rows[a.name] for a in done]
    head = _HEAD.format(version=transformers.__version__, count=len(lines),
                        passing=sum(line.endswith("| pass |") for line in lines))
    return "\n".join([head + lines[0], *lines[1:], _CONFIGURATIONS + configuration(done[0]),
                      *map(configuration, done[1:]), ""])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
