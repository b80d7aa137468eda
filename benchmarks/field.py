"""Scenarios from the field: models that people train, with the lines that they write, beside plain training.

Each scenario trains a tiny model with random weights for some steps twice: as it is, and with a budget, which
is a share of the peak of the first (the smallest budget that rkmate names, where that share cannot be met).
The outcome is

- *right*: planned as a whole, equal in every loss and every parameter, and within its budget;
- *by parts*: as *right*, with plans for parts of the model; the share of the step's bytes that they hold;
- *over*: equal, and over its budget, with a warning or without one;
- *last bits*: equal in every loss (or, if a warning says that last bits differ, except for these), and in
  every parameter except for its last bits;
- *refused*: the error's first words;
- *wrong*: it trained to another result;
- *unplanned*: equal, without any plan;
- *fails*: it does not train without rkmate;
- *skipped*: a library is not installed.

Rows are appended to ``--rows FILE`` (JSON, one row a line; benchmarks/field.jsonl unless given): what is
there is not run again. ``--write`` makes docs/field.md of that file. `scenarios/` has a module of
scenarios for each subject.

Usage: python benchmarks/field.py --libraries torch peft --names llama
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import logging
import math
import random
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from beside import add_row, read_rows
from peers import DOCS
from scenarios.base import Scenario, Task

import rkmate
from rkmate.measure.step import measure_step

PAGE, ROWS = DOCS / "field.md", Path(__file__).with_name("field.jsonl")
MODULES = ("layers", "backwards", "losses", "state", "loops", "ways", "text", "images_and_text",
           "sound_and_series", "adapters", "quantized", "diffusion", "vision", "volumes_and_graphs",
           "trainers")
"""Of `scenarios/`, in the order of docs/field.md."""
SCENARIOS: tuple[Scenario, ...] = tuple(
    s for module in MODULES for s in importlib.import_module(f"scenarios.{module}").SCENARIOS)
STEPS = 3
"""Training steps of each of the two runs."""


@dataclass(frozen=True)
class Row:
    """What came out of a scenario."""

    name: str
    library: str
    lines: str
    outcome: str
    """``right``, ``by parts``, ``over``, ``last bits``,
    ``refused``, ``wrong``, ``unplanned``, ``fails`` or ``skipped``."""
    said: str = ""
    """The error or warning; for *by parts*, the notice."""
    budget: float = 0.0
    """The budget, as a share of the plain peak."""
    peak: float = 0.0
    """The measured peak, as a share of the plain peak."""
    planned: float = 1.0
    """The share of the bytes that are kept for the backward that is planned."""
    seconds: float = 0.0
    """Of the first two steps with a budget, planning included."""


class Notices(logging.Handler):
    """Keeps what rkmate says while a scenario runs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.texts.append(record.getMessage())


@dataclass
class Trained:
    """What training leaves."""

    losses: list[float]
    tensors: list[torch.Tensor]
    model: torch.nn.Module
    peak: int | None
    """Bytes of one more step."""
    seconds: float


def trained(scenario: Scenario, put: Callable[[torch.nn.Module], torch.nn.Module] | None) -> Trained:
    """Train a scenario's model. `put`: puts a budget into the module that the scenario says."""
    seed_all(0)
    task: Task = scenario.make()
    model = task.model
    if put is not None:
        changed = put(task.planned if task.planned is not None else model)
        if task.planned is None:
            model = changed
    optimizer = torch.optim.SGD([p for p in task.model.parameters() if p.requires_grad], lr=0.01)
    losses, begin, seconds = [], time.perf_counter(), 0.0
    if task.train is not None:
        seed_all(1)
        losses = task.train(model)
        seconds = time.perf_counter() - begin
    for number in range(0 if losses else STEPS):
        optimizer.zero_grad()
        losses.append(one_step(task, model, number))
        optimizer.step()
        if number == 1:
            seconds = time.perf_counter() - begin
    optimizer.zero_grad(set_to_none=True)
    kept = [_values(t).clone() for t in (*task.model.parameters(), *task.model.buffers())]
    peak = measure_step(task.model, lambda: one_step(task, model, STEPS), timeline=False).peak
    return Trained(losses, kept, task.model, peak, seconds)


def seed_all(seed: int) -> None:
    """Seed every generator that a library may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def one_step(task: Task, model: torch.nn.Module, seed: int) -> float:
    """Forward and backward of one batch; return the loss."""
    seed_all(100 + seed)
    loss = task.step(model)
    if loss.requires_grad:
        loss.backward()
    return loss.item()


def run(scenario: Scenario, costs: str, seen: Notices) -> Row:
    """Train a scenario twice, and say what came out."""
    missing = [m for m in scenario.needs if importlib.util.find_spec(m) is None]
    row = {"name": scenario.name, "library": scenario.library, "lines": scenario.lines}
    if missing:
        return Row(**row, outcome="skipped", said=f"needs {', '.join(missing)}")
    try:
        plain = trained(scenario, None)
    except Exception as error:
        return Row(**row, outcome="fails", said=first_words(error))
    assert plain.peak is not None
    budget = int(scenario.budget * plain.peak)
    found: Trained | None = None
    for _ in range(3):
        gc.collect()
        seen.texts.clear()
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = trained(scenario, functools.partial(scenario.put, budget=budget, costs=costs))
            break
        except rkmate.InfeasibleBudget as error:
            most = 1.05 * plain.peak * (2 if scenario.skips_layers else 1)
            if error.minimum_bytes <= budget or error.minimum_bytes > most:
                return Row(**row, outcome="refused", said=first_words(error), budget=budget / plain.peak)
            budget = error.minimum_bytes
        except Exception as error:
            return Row(**row, outcome="refused", said=first_words(error), budget=budget / plain.peak)
    if found is None:
        return Row(**row, outcome="refused", said="a budget that an error named was refused")
    assert found.peak is not None
    row |= {"budget": round(budget / plain.peak, 3), "peak": round(found.peak / plain.peak, 3),
            "seconds": round(found.seconds, 1)}
    ours = [str(w.message) for w in warned if issubclass(w.category, rkmate.RkmateWarning)]
    if plain.losses != found.losses or not all(map(_equal, plain.tensors, found.tensors)):
        said = any("last bits differ" in text for text in ours)      # also of what is computed from them
        near = functools.partial(math.isclose, rel_tol=1e-5 if said else 0.0)
        same = all(map(near, plain.losses, found.losses))
        rounded = same and all(map(_nearly, plain.tensors, found.tensors))
        return Row(**row, outcome="last bits" if rounded else "wrong", said="; ".join(ours))
    notice = next((t for t in reversed(seen.texts) if " is planned by parts: " in t and "That is" in t), None)
    unplanned = not any((shown := rkmate.applied(m)) is not None and shown.has_plan
                        for m in found.model.modules()) and not getattr(found.model, "has_plan", False)
    share = re.search(r"That is (\d+)% of", notice or "")
    row["planned"] = 0.0 if unplanned else int(share[1]) / 100 if share else 1.0
    if unplanned:
        return Row(**row, outcome="unplanned", said="; ".join([*ours, *seen.texts])[:300])
    if found.peak > budget:
        return Row(**row, outcome="over", said="; ".join(ours)[:300])
    return Row(**row, outcome="right" if notice is None else "by parts", said=notice or "; ".join(ours))


def _values(t: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers, in a plain tensor also where a library keeps them quantized."""
    return t.detach().dequantize() if hasattr(t, "__tensor_flatten__") else t.detach()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _equal(one, other) or (one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max())))


def first_words(error: Exception) -> str:
    """The class of an error and the beginning of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def page(rows: Sequence[Row]) -> str:
    """The Markdown page of all rows, grouped by library."""
    known = {(r.library, r.name): r for r in rows}
    order = [known[s.library, s.name] for s in SCENARIOS if (s.library, s.name) in known]
    libraries = list(dict.fromkeys(r.library for r in order))
    kinds = ("right", "by parts", "over", "last bits", "refused", "wrong", "unplanned", "fails", "skipped")
    about = (
        "Models that people train, tiny and with random weights, with the lines that they write, for "
        "some steps next to plain training (`python benchmarks/field.py --write`):",
        "- *Right*: planned as a whole, equal to plain training in every loss and parameter, and within "
        "the budget.",
        "- *By parts*: likewise, with plans for [parts](recipes.md#by-parts) of the model that hold the "
        "named share of the step's bytes.",
        "- *Last bits*: equal in every loss, and in every parameter except for its last bits, or, as a "
        "warning says, in all except for these ([known reasons](limits.md#up-to-rounding)).",
        "Budget and peak are shares of the plain peak. Where the budget that a user writes cannot be met, "
        "it is the smallest one that the error names.")
    first, *outcomes, last = [textwrap.fill(text, 120, subsequent_indent="  " * text.startswith("-"))
                              for text in about]
    lines = ["# Scenarios from the field", "", first, "", *outcomes, "", last, "",
             "| library | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    for library in [*libraries, ""]:
        mine = [r for r in order if not library or r.library == library]
        counts = [str(sum(r.outcome == k for r in mine)) for k in kinds]
        lines.append(f"| {library or '**all**'} | " + " | ".join(counts) + " |")
    for library in libraries:
        lines += ["", f"## {library}", "", "| scenario | what the user writes | result | budget | peak |",
                  "|---|---|---|---:|---:|"]
        lines += [_line(r) for r in order if r.library == library]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    result = row.outcome
    if row.outcome == "by parts":
        result = f"by parts ({row.planned:.0%})"
    elif row.outcome == "over":
        result = "over, " + ("with a warning" if row.said else "without a word")
    elif row.said and row.outcome not in ("right", "unplanned"):
        result = f"{row.outcome}: {_cell(row.said[:160])}"
    figures = f"{row.budget:.0%} | {row.peak:.0%}" if row.peak else " | "
    return f"| {row.name} | `{_cell(row.lines)}` | {result} | {figures} |"


def _cell(text: str) -> str:
    return re.sub(r"\S*site-packages/", "", text).replace("|", "\\|").replace("`", "'")


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run scenarios, and return all rows."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="*", default=[])
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--costs", default="measured", choices=("analytic", "measured"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--again", action="store_true", help="run what is in the file, too")
    parser.add_argument("--write", action="store_true", help="write docs/field.md")
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = {(r.library, r.name): r for r in read_rows(Row, options.rows)}
    seen = Notices()
    logging.getLogger("rkmate").addHandler(seen)
    try:
        for scenario in SCENARIOS:
            key = scenario.library, scenario.name
            if (options.libraries and scenario.library not in options.libraries) or (
                    options.names and scenario.name not in options.names) or (
                    key in rows and not options.again):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows[key] = run(scenario, options.costs, seen)
            add_row(rows[key], options.rows)
    finally:
        logging.getLogger("rkmate").removeHandler(seen)
    if options.write:
        PAGE.write_text(page(list(rows.values())), encoding="utf-8")
    return list(rows.values())


if __name__ == "__main__":
    main()
