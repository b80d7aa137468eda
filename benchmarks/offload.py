"""Compare copying with recomputing: peak and time of a training step at a small budget, relative to eager's.

For each model: a checkpoint around each layer; a plan that only recomputes; a plan that also copies
activations to a folder and back (`offload=`), at the same budget. Each method's steps are interleaved with
eager's, parameters and gradients shared, peaks measured by the exact meter, times ratios of medians. Each row
is appended to ``--rows FILE`` (JSON, one row a line), so that a run can be interrupted and continued:
existing rows are not measured again. ``--write`` makes docs/offload-figures.md of such a file. ``--small``
runs tiny models of the same kinds.
"""

from __future__ import annotations

import argparse
import functools
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papers
import torch
import transformers
from beside import Forward, add_row, beside, peak_of, read_rows
from papers import loss_of, part, ratio, sharing
from peers import DOCS, Case, Segmenter, gpt

import rkmate
from rkmate.show.amounts import duration, size
from rkmate.show.copies import copies_of
from rkmate.show.replay import replay

PAGE = DOCS / "offload-figures.md"
METHODS = ("checkpoint", "recompute", "offload")
Rows = dict[tuple[str, str], "Row"]


@dataclass(frozen=True)
class Row:
    """What was measured of one method on one model."""

    model: str
    method: str
    budget: float | None = None
    """Relative to eager's peak, as all peaks are."""
    peak: float | None = None
    time: float | None = None
    """Relative to eager's, as all times without a unit are."""
    seconds: float | None = None
    """Of a step."""
    predicted_seconds: float | None = None
    predicted_peak: float | None = None
    predicted_time: float | None = None
    tensors: int | None = None
    """That are copied away."""
    away_bytes: int | None = None
    stalled_seconds: float | None = None
    """In which the step is predicted to wait for copies."""
    busy: float | None = None
    """Of the step: in which something is predicted to be copied."""
    out_rate: float | None = None
    """Of the link, measured: bytes per second, as the next one."""
    in_rate: float | None = None
    ready: float | None = None
    """Seconds of planning."""
    eager_bytes: int | None = None
    eager_seconds: float | None = None
    failed: str = ""
    """Why there are no figures."""


@dataclass(frozen=True)
class Model:
    """A model, and the budget at which it is measured."""

    make: Callable[[bool], Case]
    """Of the real size, or a small one."""
    about: str
    fraction: float
    """Of eager's peak."""


def _unet(small: bool) -> Case:
    side, batch = (32, 1) if small else (256, 4)
    return Case(Segmenter(), {"pixels": torch.randn(batch, 3, side, side),
                              "labels": torch.randint(0, 2, (batch, side, side))},
                lambda m: [m.net.down, m.net.join], sequence=False)


MODELS: dict[str, Model] = {
    "gpt2-large": Model(papers.MODELS["gpt2-large-2x512"].make, "GPT-2 large, batch 2 x 512", 0.12),
    "gpt2-medium": Model(papers.MODELS["gpt2-medium-2x1024"].make, "GPT-2 medium, batch 2 x 1024", 0.092),
    "resnet50": Model(papers.MODELS["kusumoto-resnet50"].make, "ResNet-50, eight images of 224 x 224", 0.25),
    "unet": Model(_unet, "A U-Net of four scales, four images of 256 x 256", 0.25),
    "gpt2-6": Model(lambda small: gpt(2, 32, 16, 2, 256) if small else gpt(),
                    "GPT-2 of six layers (width 256, batch 4 x 256): a short step, which copies do not help",
                    0.25),
}


def _forward(method: str, case: Case, budget: int, folder: Path) -> tuple[Forward, rkmate.Plan | None]:
    """A method's forward, of the same parameters."""
    if method == "checkpoint":
        other = sharing(case)
        return lambda: other.model(**other.kwargs).loss, None
    wrapped = rkmate.wrap(case.model, (), case.kwargs, budget=budget, progress=False,
                          offload=str(folder) if method == "offload" else None,
                          settings=rkmate.Settings(run=rkmate.RunSettings(verify=False)))
    return lambda: wrapped(**case.kwargs).loss, wrapped.plan


def _copied(plan: rkmate.Plan | None) -> dict[str, Any]:
    """What a plan copies, as fields of a row."""
    copies = None if plan is None else copies_of(replay(plan))
    if copies is None:
        return {}
    return {"tensors": copies.tensors, "away_bytes": copies.away_bytes, "stalled_seconds": copies.stalled,
            "busy": copies.busy_seconds / copies.step_seconds, "out_rate": copies.link.out_bytes_per_second,
            "in_rate": copies.link.in_bytes_per_second}


def measured(name: str, method: str, case: Case, level: int, folder: Path, repeats: int,
             fraction: float) -> Row:
    """Measure one method next to eager. `level`: eager's peak in bytes. `fraction`: budget relative to it,
    unless the method's name ends with another fraction."""
    kind, _, named = method.partition(" ")
    fraction = float(named) if named else fraction
    budget = None if kind == "checkpoint" else fraction
    start = time.perf_counter()
    try:
        forward, plan = _forward(kind, case, int(fraction * level), folder)
    except rkmate.InfeasibleBudget as error:
        return Row(name, method, budget, ready=time.perf_counter() - start, eager_bytes=level,
                   failed=f"infeasible: at least {error.minimum_bytes / level:.1%}")
    ready = time.perf_counter() - start
    found = beside(lambda: loss_of(case), case.model, forward, case.model, repeats)
    predicted = {} if plan is None else {"predicted_seconds": plan.step_seconds, "predicted_peak":
                                         plan.peak_bytes / level, "predicted_time": 1 + plan.overhead}
    return Row(name, method, budget, found.peak / level, found.ratio, found.seconds, ready=ready,
               eager_bytes=level, eager_seconds=found.eager_seconds, **predicted, **_copied(plan))


def run(names: Sequence[str], methods: Sequence[str], path: Path | None, folder: Path, *, small: bool,
        repeats: int, fraction: float | None = None) -> Rows:
    """Measure what is not in the file yet."""
    rows = {(row.model, row.method): row for row in read_rows(Row, path)}
    for name in names:
        missing = [m for m in methods if (name, m) not in rows]
        if not missing:
            continue
        torch.manual_seed(0)
        case = MODELS[name].make(small)
        case.model.train()
        level = peak_of(functools.partial(loss_of, case), case.model)
        for method in missing:
            row = rows[name, method] = measured(name, method, case, level, folder, repeats,
                                                fraction or MODELS[name].fraction)
            add_row(row, path)
        del case
    return rows


def _took(value: float | None) -> str:
    return "" if value is None else duration(value)


def table(name: str, rows: Rows) -> str:
    """The Markdown table of a model, under a line about eager and the link."""
    mine = [row for (of, _), row in rows.items() if of == name]
    lines = ["| method | peak | time | seconds | predicted peak | predicted time | predicted seconds | "
             "away | waits | link busy | planned in |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for row in mine:
        asked = row.method if row.budget is None else f"{row.method.split()[0]}, at {row.budget:.1%}"
        cells = (row.failed, "", "") if row.failed else (
            part(row.peak), ratio(row.time), _took(row.seconds))
        away = "" if row.away_bytes is None else size(row.away_bytes) if row.tensors else "nothing"
        waits = "" if row.stalled_seconds is None else duration(row.stalled_seconds)
        ready = "" if row.ready is None else f"{row.ready:.0f} s"
        lines.append(f"| {asked} | {' | '.join(cells)} | {part(row.predicted_peak)} | "
                     f"{ratio(row.predicted_time)} | {_took(row.predicted_seconds)} | {away} | {waits} | "
                     f"{'' if row.busy is None else f'{row.busy:.0%}'} | {ready} |")
    return "\n".join([_about(mine), "", *lines])


def _about(rows: Sequence[Row]) -> str:
    """What eager takes, by the second: what a link would have to carry; and what this one carries."""
    eager = [f"Eager takes {size(row.eager_bytes)} and {duration(row.eager_seconds)}: "
             f"{size(row.eager_bytes / row.eager_seconds)} for each second of the step."
             for row in rows if row.eager_seconds and row.eager_bytes]
    links = [f"The link takes {size(row.out_rate)}/s and gives {size(row.in_rate)}/s."
             for row in rows if row.out_rate and row.in_rate]
    return " ".join([*eager[:1], *links[:1]])


def write(rows: Rows) -> None:
    """The page of the documentation, of all rows."""
    about = ("# Offload, measured\n\nPeak and time of a training step, relative to eager's in the same run: "
             "a checkpoint around each layer, a plan that only recomputes, and [a plan that also copies "
             "activations to a folder](offload.md), at the same budget. Parameters and their gradients are "
             "allocated before the step and are not counted. Waits and the link's share of the step are "
             "predicted. `python benchmarks/offload.py --rows FILE --write` makes this page. Measured on a "
             f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), torch "
             f"{torch.__version__.partition('+')[0]}.\n")
    sections = [f"## {name}\n\n{model.about}.\n\n{table(name, rows)}\n" for name, model in MODELS.items()
                if any(of == name for of, _ in rows)]
    PAGE.write_text("\n".join([about, *sections]), encoding="utf-8")


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="all", help=f"of {', '.join(MODELS)}, or all")
    parser.add_argument("--methods", default=",".join(METHODS),
                        help="comma separated, as 'checkpoint,offload 0.4' (default: %(default)s)")
    parser.add_argument("--fraction", type=float, help="of eager's peak; each model has its own by default")
    parser.add_argument("--folder", type=Path, help="to copy to (default: a temporary one)")
    parser.add_argument("--rows", type=Path, help="file of rows, read and appended to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--write", action="store_true", help="docs/offload-figures.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = list(MODELS) if options.models == "all" else options.models.split(",")
    with tempfile.TemporaryDirectory() as made:
        rows = run(names, options.methods.split(","), options.rows, options.folder or Path(made),
                   small=options.small, repeats=options.repeats, fraction=options.fraction)
    for name in names:
        print(f"\n{name}\n\n{table(name, rows)}", flush=True)
    if options.write and not options.small:
        write(rows)


if __name__ == "__main__":
    main()
