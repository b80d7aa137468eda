"""Figures 2, 4 and 5 of the paper for our models, drawn into a folder.

    python benchmarks/dtr_figures.py FOLDER
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from dtr_chains import linear_chain
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import rkmate.dtr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import dtr_language_model
import dtr_maml
import dtr_routing
import dtr_treelstm
from dtr_compare import Task, compare

TASKS = (
    dtr_treelstm.task(width=32, batch=256),
    dtr_language_model.task(width=64, batch=128),
    dtr_maml.task(width=64, batch=256),
    dtr_routing.task(rows=1024),
)


def record(task: Task) -> rkmate.dtr.Program:
    """The log of one training step, costs measured on the second run."""
    torch.manual_seed(0)
    model = task.build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.log"
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            with rkmate.dtr(budget=None, log=path):
                task.loss(model, 0).backward()
        return rkmate.dtr.read_log(path)


def figure_2(folder: Path) -> None:
    """Simulated slowdown against the budget, per model and heuristic."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(4 * len(TASKS), 3.5), sharey=True)
    ratios = [r / 20 for r in range(20, 3, -1)]
    for axis, task in zip(axes, TASKS, strict=True):
        program = record(task)
        for heuristic in ("dtr", "dtr-eq", "dtr-local", "lru", "size", "msps"):
            points = []
            for ratio in ratios:
                result = rkmate.dtr.simulate(
                    program, heuristic, int(program.memory * ratio), overhead_limit=2.0
                )
                if result.status == "ok":
                    points.append((ratio, result.clock / program.compute))
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=heuristic)
        axis.set_title(task.name)
        axis.set_xlabel("budget / own peak")
    _save(figure, axes, "time / unlimited time, simulated", folder / "dtr_figure_2.png")


def _save(figure: Figure, axes: Sequence[Axes], label: str, path: Path) -> None:
    """With the label at the first of the axes, the legend beside the last."""
    axes[0].set_ylabel(label)
    shown: dict[str, Artist] = {}
    for axis in axes:
        lines, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, lines, strict=True))
    figure.set_layout_engine("constrained")
    figure.legend(list(shown.values()), list(shown), loc="outside center right")
    figure.savefig(path, dpi=120)


def figure_4(folder: Path) -> None:
    """Where the time goes, per model and budget, measured."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(4 * len(TASKS), 3.5))
    for axis, task in zip(axes, TASKS, strict=True):
        names, own, again, books = [], [], [], []
        for ratio in (1.0, 0.8, 0.6, 0.5):
            row = compare(task, (ratio,), steps=1)[0]
            names.append(f"{ratio:.0%}")
            again.append(row.recompute_seconds)
            books.append(row.bookkeeping_seconds)
            own.append(row.eager_seconds)
        below = [0.0] * len(names)
        for label, part in (("eager", own), ("run again", again), ("bookkeeping", books)):
            axis.bar(names, part, bottom=below, label=label)
            below = [a + b for a, b in zip(below, part, strict=True)]
        axis.set_title(task.name)
        axis.set_xlabel("budget / own peak")
    _save(figure, axes, "seconds", folder / "dtr_figure_4.png")


def figure_5(folder: Path, length: int = 200) -> None:
    """Which tensors of a linear chain are in memory, over time (h_e*, budget 2 sqrt N)."""
    trace = rkmate.dtr.Trace(events=[], memory=[])
    budget = 2 * math.ceil(math.sqrt(length))
    result = rkmate.dtr.simulate(linear_chain(length), "e*", budget, trace=trace)
    since: dict[str, int] = {}
    spans = []
    for clock, kind, name in trace.events:
        if kind == "evict":
            spans.append((name, since.pop(name), clock))
        else:
            since[name] = clock
    spans += [(name, start, result.clock) for name, start in since.items()]
    figure, axis = plt.subplots(figsize=(9, 5))
    for kind, color in (("t", "tab:blue"), ("g", "tab:red")):
        part = [span for span in spans if span[0].startswith(kind)]
        axis.hlines(
            [int(name[1:]) for name, _, _ in part],
            [start for _, start, _ in part],
            [end for _, _, end in part],
            color=color,
            label="activations" if kind == "t" else "gradients",
        )
    axis.set_xlabel("operations")
    axis.set_ylabel("node")
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "dtr_figure_5.png", dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/dtr_figures.py FOLDER")
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    figure_5(target)
    figure_2(target)
    figure_4(target)
