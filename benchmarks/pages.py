"""Training steps with fresh pages, and with pages that stay with the process (`rkmate.keep_pages`).

One process; steps of both take turns, each after one that is not measured. Linux, CPU."""

from __future__ import annotations

import argparse
import functools
import gc
import platform
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from beside import Forward, add_row, peak_of, read_rows, step
from papers import loss_of, part
from peers import DOCS, Case, gpt, images

import rkmate

PAGE = DOCS / "pages.md"
BUDGETS = (None, 1.0, 0.5)
PAGES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fresh": nullcontext, "stay": rkmate.keep_pages}


def _resnet50(*, small: bool) -> Case:
    widths = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]} if small else {}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**widths))
    return images(model, 2 if small else 8, 32 if small else 224,
                  lambda m: [s.layers for s in m.resnet.encoder.stages])


def _gpt(*, small: bool) -> Case:
    return gpt(2, 32, 16, 2, 256) if small else gpt(6, 512, 256, 4, 50257)


MODELS: dict[str, Callable[..., Case]] = {"gpt": _gpt, "resnet50": _resnet50}


@dataclass(frozen=True)
class Row:
    """A method with or without pages that stay: medians of steps."""

    model: str
    budget: float | None
    """Of eager's peak; None for eager."""
    pages: str
    """Which of them stay."""
    seconds: float
    processor: float
    """Seconds of all threads."""
    system: float
    """Of these, the system's."""
    fresh: float
    """Pages that the system gave."""
    resident: int
    """The most, in bytes."""
    counted: int
    """The plan's peak, or eager's, in bytes above what stands."""
    predicted: float | None
    """The plan's seconds."""


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


def measured(model: str, budget: float | None, *, small: bool, repeats: int) -> list[Row]:
    """A method's two rows."""
    torch.manual_seed(0)
    case = MODELS[model](small=small)
    case.model.train()
    forward: Forward = functools.partial(loss_of, case)
    counted, predicted = peak_of(forward, case.model), None
    if budget is not None:
        wrapped = rkmate.wrap(case.model, (), case.kwargs, budget=int(budget * counted), progress=False,
                              settings=rkmate.Settings(run=rkmate.RunSettings(verify=False)))
        forward = lambda: wrapped(**case.kwargs).loss           # noqa: E731
        counted, predicted = wrapped.plan.peak_bytes, wrapped.plan.step_seconds
    found: dict[str, list[tuple[float, float, float, float, int]]] = {pages: [] for pages in PAGES}
    for _ in range(repeats):
        for pages, kept in PAGES.items():
            with kept():
                step(forward, case.model)
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
                before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                step(forward, case.model)
                seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
                system = after.ru_stime - before.ru_stime
                found[pages].append((seconds, after.ru_utime - before.ru_utime + system, system,
                                    after.ru_minflt - before.ru_minflt, _status("VmHWM")))
    return [Row(model, budget, pages, *(statistics.median_low(column) for column in zip(*rows, strict=True)),
                counted=counted, predicted=predicted) for pages, rows in found.items()]


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    lines = ["| model | method | pages | time, of eager's | of the prediction | processor, of eager's | "
             "system's part | fresh pages | resident | counted |",
             "|---|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        eager = next(r for r in rows if r.model == row.model and r.budget is None and r.pages == "fresh")
        said = "" if row.predicted is None else f"{row.seconds / row.predicted:.2f}"
        lines.append(f"| {row.model} | {'eager' if row.budget is None else f'rkmate {row.budget:.0%}'} | "
                     f"{row.pages} | {row.seconds / eager.seconds:.2f} | {said} | "
                     f"{row.processor / eager.processor:.2f} | {part(row.system / row.processor)} | "
                     f"{row.fresh * 4096 / 2**20:,.0f} MiB | {row.resident / 2**20:,.0f} MiB | "
                     f"{row.counted / 2**20:,.0f} MiB |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", type=Path, help="file of rows, read and appended to")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--write", action="store_true", help="docs/pages.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = read_rows(Row, options.rows)
    for model in options.models.split(","):
        for budget in BUDGETS:
            if not any((row.model, row.budget) == (model, budget) for row in rows):
                for row in measured(model, budget, small=options.small, repeats=options.repeats):
                    add_row(row, options.rows)
                    rows.append(row)
    print(table(rows))
    if options.write and not options.small:
        text = PAGE.read_text(encoding="utf-8")
        begin, end = "<!-- table: begin -->", "<!-- table: end -->"
        before, after = text.split(begin)[0], text.split(end)[1]
        about = (f"On a CPU ({platform.machine()}, {torch.get_num_threads()} threads), torch "
                 f"{torch.__version__.partition('+')[0]}.")
        PAGE.write_text(f"{before}{begin}\n\n{about}\n\n{table(rows)}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
