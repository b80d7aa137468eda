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

A test builds each architecture of the transformers library ({version}) below from a small configuration with
random weights, wraps it, and trains it for two steps on random data: at its own peak, and at 0.6 of its peak
(or at its smallest feasible budget, if that is larger). {passing} of {count} pass.

- *pass*: output, loss, every gradient, every buffer and the random state are equal to eager mode's, bit for
  bit. The measured peak is within the budget, and within 2% of the predicted peak. Any other entry is the
  error that a user gets.
- *own peak*, *budgeted peak*: predicted bytes of a step. *share*: the budgeted peak relative to the own peak.

`python -m tests.architectures.make_table docs/architectures.md` makes this page.

| architecture | subject | own peak, bytes | budgeted peak, bytes | share | result |
| --- | --- | ---: | ---: | ---: | --- |
"""
_CONFIGURATIONS = """
## Configurations

Options that are not listed have the library's defaults. Inputs are random; models are in train mode.

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
