"""The papers' own tables, at their own sizes: each method planned with measured costs, and run.

Peak and time of a training step relative to eager's in the same run: each method's steps are interleaved with
eager's, parameters and gradients shared, peaks measured by the exact meter, times ratios of medians. Each row
is appended to ``--rows FILE`` (JSON, one row a line), so that a run can be interrupted and continued:
existing rows are not measured again. ``--write`` makes docs/papers.md of such a file.
``--small`` runs tiny models of the same kinds.
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from beside import Forward, add_row, beside, peak_of, read_rows
from peers import DOCS, Case, checkpointed, gpt, images
from torch import nn

import rkmate

PAGE = DOCS / "papers.md"
Rows = dict[tuple[str, str], "Row"]


@dataclass(frozen=True)
class Said:
    """A row of a paper's table, relative to the plain run there."""

    peak: float
    time: float | None = None
    budget: float | None = None
    """Of the peak of the plain run; None where none was given."""


@dataclass(frozen=True)
class Row:
    """What was measured of one method on one model."""

    model: str
    method: str
    peak: float | None = None
    """Relative to eager's."""
    time: float | None = None
    """The same."""
    predicted_peak: float | None = None
    predicted_time: float | None = None
    ready: float | None = None
    """Seconds of planning."""
    eager_bytes: int | None = None
    eager_seconds: float | None = None
    failed: str = ""
    """Why there are no figures."""


@dataclass(frozen=True)
class Model:
    """A model of a paper."""

    make: Callable[[bool], Case]
    """Of the real size, or a small one."""
    about: str
    fractions: tuple[float, ...]
    """Budgets, as parts of eager's peak."""
    said: dict[str, tuple[Said, ...]]
    """By method: rows of the paper."""
    planners: tuple[str, ...] = ("rotor",)
    """Other planners, at the same budgets."""


def _gpt2(layers: int, width: int, batch: int, length: int) -> Callable[[bool], Case]:
    def make(small: bool) -> Case:
        if small:
            return gpt(2, 32, 16, 2, 256)
        return gpt(layers, width, length, batch, 50257)
    return make


def _table(eager: tuple[float, float], *rows: tuple[str, float, float, float]) -> dict[str, tuple[Said, ...]]:
    """Rows (method, budget GiB, peak GiB, milliseconds) relative to the plain run's (peak, milliseconds)."""
    result: dict[str, tuple[Said, ...]] = {}
    for method, budget, peak, milliseconds in rows:
        row = Said(peak / eager[0], milliseconds / eager[1], budget / eager[0])
        result[method] = (*result.get(method, ()), row)
    return result


def _residual(depths: Sequence[int], size: int, batch: int, kind: str) -> Callable[[bool], Case]:
    def make(small: bool) -> Case:
        if kind == "regnet":
            config = transformers.RegNetConfig(
                embedding_size=8 if small else 32,
                hidden_sizes=[8, 16, 16, 16] if small else [232, 696, 1392, 3712],
                depths=[1, 1, 1, 1] if small else list(depths), groups_width=8 if small else 232)
            model: nn.Module = transformers.RegNetForImageClassification(config)
            return images(model, 2 if small else batch, 32 if small else size,
                          lambda m: [s.layers for s in m.regnet.encoder.stages])
        widths = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16]} if small else {}
        model = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(depths=[1, 1, 1, 1] if small else list(depths), **widths))
        return images(model, 2 if small else batch, 32 if small else size,
                      lambda m: [s.layers for s in m.resnet.encoder.stages])
    return make


MODELS: dict[str, Model] = {
    "gpt2-large-2x512": Model(
        _gpt2(36, 1280, 2, 512), "GPT-2 large, batch 2 x 512 (Rockmate, appendix E)",
        (0.08, 0.122, 0.41, 0.5, 0.97),
        _table((6.708, 457.173), ("rotor", 0.85, 0.846, 593.507), ("rkmate", 0.85, 0.816, 564.041),
               ("rotor", 2.8, 2.36, 522.163), ("rkmate", 2.8, 2.741, 481.65),
               ("rotor", 7.6, 6.515, 456.971), ("rkmate", 7.6, 6.516, 465.376))),
    "gpt2-large-4x256": Model(
        _gpt2(36, 1280, 4, 256), "GPT-2 large, batch 4 x 256 (Rockmate, appendix E)", (0.154, 0.338, 0.963),
        _table((5.158, 432.646), ("rotor", 0.85, 0.808, 561.066), ("rkmate", 0.85, 0.795, 531.255),
               ("rotor", 1.8, 1.473, 526.807), ("rkmate", 1.8, 1.745, 486.976),
               ("rotor", 5.6, 4.69, 439.797), ("rkmate", 5.6, 4.967, 440.41))),
    "gpt2-medium-2x1024": Model(
        _gpt2(24, 1024, 2, 1024), "GPT-2 medium, batch 2 x 1024 (Rockmate, appendix E)",
        (0.08, 0.092, 0.365, 0.981),
        _table((10.782, 480.33), ("rotor", 1.0, 1.188, 751.478), ("rkmate", 1.0, 0.994, 619.055),
               ("rotor", 4.0, 3.351, 558.858), ("rkmate", 4.0, 3.941, 516.758),
               ("rotor", 11.6, 10.326, 494.043), ("rkmate", 11.6, 10.582, 490.49))),
    "gpt2-medium-4x512": Model(
        _gpt2(24, 1024, 4, 512), "GPT-2 medium, batch 4 x 512 (Rockmate, appendix E)", (0.133, 0.268, 0.973),
        _table((7.407, 430.596), ("rotor", 1.0, 1.188, 658.736), ("rkmate", 1.0, 0.986, 547.343),
               ("rotor", 2.0, 1.824, 532.637), ("rkmate", 2.0, 1.988, 497.298),
               ("rotor", 7.6, 6.664, 445.434), ("rkmate", 7.6, 7.207, 440.769))),
    "resnet101": Model(
        _residual((3, 4, 23, 3), 224, 8, "resnet"),
        "ResNet-101, eight images of 224 x 224 (Rockmate, figure 6: "
        "its text has no figures)", (0.2, 0.3, 0.5, 0.7), {}),
    "regnet32": Model(
        _residual((2, 5, 12, 1), 224, 4, "regnet"),
        "RegNet-32, four images of 224 x 224 (Rockmate, figure 7: "
        "its text has no figures)", (0.3, 0.4, 0.5, 0.7), {}),
    "rotor-figure-3": Model(
        _residual((3, 4, 23, 3), 1000, 1, "resnet"),
        "ResNet-101, one image of 1000 x 1000 (Rotor, figure 3: "
        "plain takes 2.83 GiB in the paper; throughput is 15% above sequential on average)",
        (0.2, 0.3, 0.5, 0.7), {}, ("rotor", "sequential", "revolve")),
    "kusumoto-resnet50": Model(
        _residual((3, 4, 6, 3), 224, 8, "resnet"),
        "ResNet-50 (Kusumoto et al., table 1: batch 96, parameters "
        "and their gradients counted in the peak)", (0.38, 0.49), {
            "lower-sets-memory": (Said(0.38),), "lower-sets": (Said(0.49),), "chen": (Said(0.41),),
            "lower-sets-exact-memory": (Said(0.38),), "lower-sets-exact": (Said(0.49),)},
        ("lower-sets-memory", "lower-sets", "chen")),
    "kusumoto-resnet152": Model(
        _residual((3, 8, 36, 3), 224, 4, "resnet"),
        "ResNet-152 (Kusumoto et al., table 1: batch 48, parameters "
        "and their gradients counted in the peak)", (0.25, 0.27), {
            "lower-sets-memory": (Said(0.25),), "lower-sets": (Said(0.27),), "chen": (Said(0.26),),
            "lower-sets-exact-memory": (Said(0.25),), "lower-sets-exact": (Said(0.27),)},
        ("lower-sets-memory", "lower-sets", "chen")),
}


def methods_of(model: Model, fractions: Sequence[float] | None, named: str | None = None) -> list[str]:
    """Names of the methods: a planner and a part of eager's peak, or a method without a budget. `named`: some
    of them, comma separated, instead."""
    if named is not None:
        return named.split(",")
    return ["checkpoint", *(f"{planner} {fraction:g}" for fraction in fractions or model.fractions
                            for planner in ("rkmate", *model.planners))]


def _forward(name: str, case: Case, eager: int) -> tuple[Forward, rkmate.Plan | None]:
    """A method's forward of the same parameters. The planner ``in-place`` is ours with gradients in place."""
    if name == "checkpoint":
        return lambda: case.model(**case.kwargs).loss, None
    planner, fraction = name.split()
    ways: dict[str, dict[str, Any]] = {"rkmate": {}, "in-place": {"gradients": "in_place"}}
    settings = rkmate.Settings(**ways.get(planner, {"planner": planner, "chunked_loss": "never"}),
                               run=rkmate.RunSettings(verify=False))
    wrapped = rkmate.wrap(case.model, (), case.kwargs, budget=int(float(fraction) * eager), progress=False,
                          settings=settings)
    return lambda: wrapped(**case.kwargs).loss, wrapped.plan


def sharing(case: Case) -> Case:
    """The same model with `torch.utils.checkpoint` around each layer, and the same parameters."""
    known = {id(t): t for t in (*case.model.parameters(), *case.model.buffers())}
    other = Case(copy.deepcopy(case.model, known), case.kwargs, case.lists, case.sequence)
    checkpointed(other, grouped=False)
    return other


def loss_of(case: Case) -> torch.Tensor:
    """Of eager's forward."""
    loss: torch.Tensor = case.model(**case.kwargs).loss
    return loss


def measured(name: str, method: str, case: Case, level: int, repeats: int) -> Row:
    """Measure one method next to eager. `level`: eager's peak in bytes."""
    start = time.perf_counter()
    try:
        forward, plan = _forward(method, sharing(case) if method == "checkpoint" else case, level)
    except rkmate.InfeasibleBudget as error:
        return Row(name, method, ready=time.perf_counter() - start, eager_bytes=level,
                   failed=f"infeasible: at least {error.minimum_bytes / level:.1%}")
    except (rkmate.PlanningTimeout, rkmate.ArgumentError) as error:
        return Row(name, method, ready=time.perf_counter() - start, eager_bytes=level,
                   failed=str(error)[:120])
    ready = time.perf_counter() - start
    found = beside(functools.partial(loss_of, case), case.model, forward, case.model, repeats)
    return Row(name, method, found.peak / level, found.ratio,
               None if plan is None else plan.peak_bytes / level, None if plan is None else 1 + plan.overhead,
               ready, level, found.eager_seconds)


def part(value: float | None) -> str:
    """Of eager's, as a cell; empty where it is not known."""
    return "" if value is None else f"{value:.1%}"


def ratio(value: float | None) -> str:
    """The same of a time."""
    return "" if value is None else f"{value:.3f}"


def _said(model: Model, method: str) -> Said | None:
    """The paper's row for a method, at the budget that is nearest."""
    kind, _, fraction = method.partition(" ")
    rows = model.said.get(kind, ())
    near = [s for s in rows if s.budget is None or abs(min(s.budget, 1) / float(fraction) - 1) < 0.08]
    return near[0] if near else None


def _asked(method: str) -> tuple[float, str]:
    """The budget that a method's name says, smallest first; those without one come before."""
    planner, _, fraction = method.partition(" ")
    return float(fraction or 0), planner


def table(name: str, rows: Rows) -> str:
    """The Markdown table of a model."""
    model = MODELS[name]
    lines = ["| method | peak | time | predicted peak | predicted time | planned in | paper's peak | "
             "paper's time |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for method, row in sorted(((method, row) for (of, method), row in rows.items() if of == name),
                              key=lambda found: _asked(found[0])):
        said = _said(model, method) or Said(float("nan"))
        theirs = ("" if said.peak != said.peak else part(said.peak), ratio(said.time))
        cells = (row.failed, "") if row.failed else (part(row.peak), ratio(row.time))
        ready = "" if row.ready is None else f"{row.ready:.0f} s"
        lines.append(f"| {method} | {' | '.join(cells)} | {part(row.predicted_peak)} | "
                     f"{ratio(row.predicted_time)} | {ready} | {' | '.join(theirs)} |")
    return "\n".join(lines)


def write(rows: Rows) -> None:
    """The page of the documentation, of all rows."""
    about = ("# The papers' tables\n\nPeak and time of a training step, relative to eager's in the same "
             "run, next to the figures of the papers. Parameters and their gradients are allocated before "
             "the step and are not counted. `rkmate` and the other planners get a part of eager's peak as "
             "their budget; `in-place` is rkmate with gradients in place; `checkpoint` has a checkpoint "
             "around each layer. Predicted times add up operations that were measured one by one, on memory "
             "that was used before. In an eager step, the system must first clear the memory of new "
             "tensors. A plan that holds less therefore runs faster, relative to eager, than predicted. "
             "`python benchmarks/papers.py --rows FILE --write` makes this page. Measured on a CPU "
             f"({platform.machine()}, {torch.get_num_threads()} threads), torch "
             f"{torch.__version__.partition('+')[0]}.\n")
    sections = [f"## {name}\n\n{model.about}.\n\n{table(name, rows)}\n" for name, model in MODELS.items()
                if any(of == name for of, _ in rows)]
    PAGE.write_text("\n".join([about, *sections]), encoding="utf-8")


def run(names: Sequence[str], fractions: Sequence[float] | None, path: Path | None, *, small: bool,
        repeats: int, methods: str | None = None) -> Rows:
    """Measure what is not in the file yet."""
    rows = {(row.model, row.method): row for row in read_rows(Row, path)}
    for name in names:
        missing = [m for m in methods_of(MODELS[name], fractions, methods) if (name, m) not in rows]
        if not missing:
            continue
        torch.manual_seed(0)
        case = MODELS[name].make(small)
        case.model.train()
        level = peak_of(functools.partial(loss_of, case), case.model)
        for method in missing:
            row = rows[name, method] = measured(name, method, case, level, repeats)
            add_row(row, path)
        del case
    return rows


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="all", help=f"of {', '.join(MODELS)}, or all")
    parser.add_argument("--fractions", help="of eager's peak, comma separated; the papers' by default")
    parser.add_argument("--methods", help="comma separated, as 'checkpoint,rkmate 0.41,in-place 0.122'")
    parser.add_argument("--rows", type=Path, help="file of rows, read and appended to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--write", action="store_true", help="docs/papers.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = list(MODELS) if options.models == "all" else options.models.split(",")
    fractions = [float(f) for f in options.fractions.split(",")] if options.fractions else None
    rows = run(names, fractions, options.rows, small=options.small, repeats=options.repeats,
               methods=options.methods)
    for name in names:
        print(f"\n{name}\n\n{table(name, rows)}", flush=True)
    if options.write and not options.small:
        write(rows)


if __name__ == "__main__":
    main()
