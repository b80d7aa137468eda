"""How long planning takes, by depth: GPT-2 with 6 to 48 layers, cold and for a second budget.

Each depth runs in a fresh process with an empty cache, and in another one that measures what planning
allocates in addition to the model. Prints a Markdown table.

``--waits`` prints what a user waits for: seconds until a wrapped model has done its first step, until a
second budget and five more are planned, and until the first step in a second process; medians.
``--profile`` prints another one: processor and wall seconds of each stage, from the model to the end of its
first planned step, for these depths and for models without equal blocks, costs measured and estimated; and
what a second process takes, which finds on disk what the first one has left. ``--gaps`` prints by how much
plans of the other benchmarks' models may be slower than the best.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any


class _Unmetered:
    """In place of the meter that planning itself uses: the two cannot run at once."""

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def part(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def peaks(self) -> dict[int, int]:
        return {}


def allocated(layers: int, width: int, length: int) -> None:
    """Print the bytes that planning allocates in addition to the model, and those that training the largest
    block takes: one line of JSON."""
    import planning_models

    from rkmate.device.cpu import Cpu
    from rkmate.ir.schedule import from_order
    from rkmate.ir.simulate import simulate
    from rkmate.measure.step import measure_peak
    from rkmate.pipeline.prepare import prepare, trace
    from rkmate.pipeline.search import plan_prepared
    from rkmate.pipeline.settings import Settings
    from rkmate.support.progress import Progress

    model, kwargs = planning_models.gpt(layers, width, length)
    Cpu.parts_meter = lambda device: _Unmetered()  # type: ignore[assignment,method-assign,misc]
    found = []

    def plan() -> None:
        here = prepare(trace(model, (), kwargs, Settings(), Progress(False)))
        plan_prepared(here, here.baseline.peak // 2)
        found.append(here)

    peak = measure_peak(plan).peak
    prepared, blocks = found[0], []
    cd, graphs = prepared.graph, [prepared.class_graphs[k] for k in prepared.blocked.classes]
    for block, graph in zip(prepared.partition.blocks, graphs, strict=True):
        # As torch runs it: nothing is written over what dies, and the model's outputs stay.
        plain = replace(graph, c=tuple(replace(c, donors=()) for c in graph.c))
        returned = {j for i in block.c for j in cd.c[i].outputs} & set(cd.outputs)
        blocks.append(simulate(plain, from_order(plain, range(len(plain.c)), plain.loss)).peak
                      + sum(cd.d[j].size for j in returned))
    print(json.dumps({"planning": peak, "block": max(blocks)}))


def measure(layers: int, width: int, length: int) -> None:
    """One depth; prints one line of JSON."""
    import planning_models

    from rkmate.pipeline.attempts import attempted
    from rkmate.pipeline.prepare import prepare, trace
    from rkmate.pipeline.settings import Settings
    from rkmate.pipeline.solve import solve
    from rkmate.planners.chain import smallest_of_chain
    from rkmate.planners.registry import planner
    from rkmate.support.progress import Progress

    model, kwargs = planning_models.gpt(layers, width, length)
    start = time.perf_counter()
    prepared = prepare(trace(model, (), kwargs, Settings(), Progress(False)))
    solved, method, whole = solve(prepared), planner("rockmate"), prepared.baseline
    first = attempted(prepared, solved, method, whole.peak // 2)
    cold = time.perf_counter() - start
    start = time.perf_counter()
    attempted(prepared, solved, method, int(whole.peak * 0.7), known=first.found)
    second = time.perf_counter() - start
    overheads = {}
    for fraction in (1.0, 0.7, 0.5, 0.35):
        found = attempted(prepared, solved, method, int(whole.peak * fraction), known=first.found)
        overheads[str(fraction)] = float("nan") if found.plan is None else found.plan.overhead
    assert first.plan is not None
    print(json.dumps({
        "layers": layers, "cold": cold, "second": second, "stages": dict(first.plan.stage_seconds),
        "nodes": dict(first.plan.nodes), "overheads": overheads,
        "smallest": smallest_of_chain(solved.problem).peak / whole.peak}))


# -- Seconds of each stage -------------------------------------------------------------------------

STAGES = (
    ("capture", "rkmate.pipeline.prepare.capture"),
    ("passes, blocks", "rkmate.pipeline.prepare.simplify"),
    ("passes, blocks", "rkmate.pipeline.prepare.block"),
    ("measuring", "rkmate.pipeline.prepare.measured_costs"),
    ("measuring", "rkmate.pipeline.prepare.with_operation_costs"),
    ("options", "rkmate.pipeline.solve.options_of"),
    ("search", "rkmate.pipeline.attempts.solve_more"),
    ("search", "rkmate.pipeline.attempts.ask"),
    ("search", "rkmate.pipeline.attempts.with_larger_tiles"),
    ("finishing", "rkmate.planners.default.finished"),
    ("finishing", "rkmate.pipeline.attempts.plan_of"),
    ("text", "rkmate.runtime.plan_cache.emit"),
    ("rest", "rkmate.pipeline.search.recall"),
)
"""Stages of planning, each with the functions whose calls it consists of, by the names that their callers
know. What a stage calls of another one counts there alone."""
COLUMNS = (*dict.fromkeys(stage for stage, _ in STAGES), "first step")
OTHERS = ("efficientnet", "densenet-24", "swin", "hrnet", "unet", "diffusers", "detr", "mixture", "lstm-100",
          "ode-200")
"""Models without equal blocks, or with few. A number after the name: of layers, or of steps."""

BENCHMARKED = ("gpt", "gpt12", "resnet18", "resnet50", "regnet", "unet", "t5", "vit")
"""Models of the other benchmarks."""


class Clock:
    """Processor seconds of each stage, without those of the stages that it calls."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(COLUMNS, 0.0)
        self._inner: list[float] = []

    def timed(self, stage: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is timed."""
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.process_time()
            try:
                return run(*args, **kwargs)
            finally:
                whole = time.process_time() - begin
                self.spent[stage] += whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole
        return timed

    def watch(self) -> None:
        """Time the stages from now on."""
        for stage, path in STAGES:
            place, _, name = path.rpartition(".")
            module = importlib.import_module(place)
            setattr(module, name, self.timed(stage, getattr(module, name)))

    @property
    def all(self) -> float:
        """Processor seconds of all stages."""
        return sum(self.spent.values())


def profile(name: str, width: int, length: int, costs: Any) -> None:
    """Wrap one model at half of its peak and run a step, all stages timed; prints one line of JSON."""
    import planning_models

    import rkmate
    from rkmate.pipeline import search
    from rkmate.torch_seam.trace import load

    load()
    clock = Clock()
    clock.watch()
    variants: list[float] = []
    look_at = search._Comparison.look_at

    def looked_at(*args: Any) -> None:
        before = clock.all
        look_at(*args)
        variants.append(clock.all - before)

    search._Comparison.look_at = looked_at  # type: ignore[method-assign]

    model, args, kwargs = planning_models.made(name, width, length)
    begin = time.process_time(), time.perf_counter()
    wrapped = rkmate.wrap(model, args, kwargs, budget=0.5, progress=False,
                          settings=rkmate.Settings(costs=costs))
    planned = time.process_time() - begin[0], time.perf_counter() - begin[1]
    out = wrapped(*args, **kwargs)
    loss = out if hasattr(out, "backward") else out.loss
    loss.sum().backward()
    done = time.process_time() - begin[0]
    spent = dict(clock.spent)
    spent["rest"] += planned[0] - clock.all
    spent["first step"] = done - planned[0]
    print(json.dumps({"spent": spent, "others": sum(variants[1:]), "planned": planned[1],
                      "captured": wrapped.plan.nodes["captured"], "gap": wrapped.plan.gap,
                      "overhead": wrapped.plan.overhead}))


def print_profiles(names: list[str], width: int, length: int) -> None:
    """Print a table of the stages' processor seconds for each model and source of costs. The last columns are
    seconds by the clock, until there is a planned module: in the first process, and in a second one that
    finds on disk what the first has left; and processor seconds of the second one's capture."""
    print(f"| model | captured | costs | {' | '.join(COLUMNS)} | other variants | planned "
          "| second process: planned | its capture | overhead, gap |")
    print("|---|--:|---" + "|--:" * (len(COLUMNS) + 5) + "|")
    for name in names:
        for costs in ("measured", "analytic"):
            with tempfile.TemporaryDirectory() as folder:
                found, again = (in_process(folder, "--one", name, "--width", str(width), "--length",
                                           str(length), "--profile", "--costs", costs) for _ in range(2))
            gap = "none known" if found["gap"] is None else f"{found['gap']:.1%}"
            cells = [_cell(each) for each in (
                *(found["spent"][column] for column in COLUMNS), found["others"], found["planned"],
                again["planned"], again["spent"]["capture"])]
            print(f"| {name} | {found['captured']:,} | {costs} | {' | '.join(cells)} "
                  f"| {found['overhead']:+.1%}, {gap} |", flush=True)


def _cell(seconds: float) -> str:
    return "" if seconds < 0.05 else f"{seconds:.1f}"


# -- What a user waits for -------------------------------------------------------------------------

BUDGETS = (0.5, 0.6, 0.45, 0.55, 0.65, 0.7, 0.4)
"""Parts of the own peak: the first, the second, and five more."""
FIRST = {"large": 0.41}
"""Other first budgets, for models of which nothing but that is asked."""


def waits(name: str, width: int, length: int, costs: Any) -> None:
    """Wrap one model within each budget, and run a step within the first; prints one line of JSON."""
    import planning_models

    import rkmate
    from rkmate.torch_seam.trace import load

    load()
    model, args, kwargs = planning_models.made(name, width, length)
    spent: list[tuple[float, float]] = []
    for k, budget in enumerate([FIRST[name]] if name in FIRST else BUDGETS):
        begin = time.perf_counter(), time.process_time()
        wrapped = rkmate.wrap(model, args, kwargs, budget=budget, progress=False,
                              settings=rkmate.Settings(costs=costs))
        if k == 0:
            overhead, gap = wrapped.plan.overhead, wrapped.plan.gap
            spent.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            out = wrapped(*args, **kwargs)
            (out if hasattr(out, "backward") else out.loss).sum().backward()
        spent.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    print(json.dumps({"spent": spent, "overhead": overhead, "gap": gap}))


def print_waits(names: list[str], width: int, length: int, costs: str, repeats: int) -> None:
    """Print a table of medians by the clock, with processor seconds."""
    print("| model | planned | first step done | second budget | five more | first step, second process "
          "| overhead, gap |\n|---|--:|--:|--:|--:|--:|--:|")
    for name in names:
        more = "--one", name, "--width", str(width), "--length", str(length), "--waits", "--costs", costs
        runs: list[list[Any]] = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                found = in_process(folder, *more)
                again = in_process(folder, *more)
            planned, first, *others = found["spent"]
            columns = [planned, first, again["spent"][1]]
            if others:
                columns[2:2] = [others[0], tuple(sum(both) for both in zip(*others[1:], strict=True))]
            runs.append(columns)
        medians = [[statistics.median(side) for side in zip(*column, strict=True)]
                   for column in zip(*runs, strict=True)]
        cells = [f"{wall:.2f} ({processor:.2f})" for wall, processor in medians]
        if len(cells) == 3:
            cells[2:2] = ["", ""]
        gap = "none known" if found["gap"] is None else f"{found['gap']:.1%}"
        print(f"| {name} | {' | '.join(cells)} | {found['overhead']:+.1%}, {gap} |", flush=True)


# -- Gaps to the bound -----------------------------------------------------------------------------

def gaps(name: str) -> None:
    """Plan a model of the benchmarks, costs estimated, at 0.5, 0.35 and the smallest budget; prints one line
    of JSON."""
    import fused

    import rkmate
    case = fused.made(name, small=False)
    settings = rkmate.Settings(costs="analytic")
    start, found = time.process_time(), {}
    budgets: list[float | int] = [0.5, 0.35, 1]
    for budget in budgets:
        try:
            plan = rkmate.plan(case.model, (), case.kwargs, budget=budget, progress=False, settings=settings)
        except rkmate.InfeasibleBudget as error:
            budget = error.minimum_bytes
            plan = rkmate.plan(case.model, (), case.kwargs, budget=budget, progress=False, settings=settings)
        found[f"{plan.budget_bytes / plan.baseline_peak_bytes:.3f}"] = (plan.overhead, plan.gap)
    print(json.dumps({"plans": found, "seconds": time.process_time() - start}))


def print_gaps(names: list[str]) -> None:
    """Print a table of the gaps of the benchmarks' models, each in a process of its own."""
    print("| model | budget: overhead, gap to the bound | processor seconds |\n|---|---|--:|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found = in_process(folder, "--one", name, "--gaps")
        cells = [f"{budget}: {overhead:+.1%}, " + ("none known" if gap is None else f"{gap:.1%}")
                 for budget, (overhead, gap) in found["plans"].items()]
        print(f"| {name} | {'; '.join(cells)} | {found['seconds']:.1f} |", flush=True)


# -- Processes -------------------------------------------------------------------------------------

def in_process(folder: str, *arguments: str) -> dict[str, Any]:
    """Run this file in a process of its own, whose cache is a folder; its last line."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "RKMATE_CACHE_DIR": folder, "PYTHONDONTWRITEBYTECODE": ""})
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def fresh(layers: int, width: int, length: int, *more: str) -> dict[str, Any]:
    """One depth in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        return in_process(folder, "--one", str(layers), "--width", str(width), "--length", str(length), *more)


def main() -> None:
    """Run all depths and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="6,12,24,48")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="print the seconds of each stage")
    parser.add_argument("--waits", action="store_true", help="print what a user waits for")
    parser.add_argument("--repeats", type=int, default=3, help="with --waits: processes")
    parser.add_argument("--gaps", action="store_true",
                        help="print how far plans of the benchmarks' models may be from the best")
    parser.add_argument("--models", help="with --profile or --gaps: further models, or the models")
    parser.add_argument("--costs", default="measured", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one and options.gaps:
        gaps(options.one)
        return
    if options.one and options.profile:
        profile(options.one, options.width, options.length, options.costs)
        return
    if options.one and options.waits:
        waits(options.one, options.width, options.length, options.costs)
        return
    if options.one:
        (allocated if options.memory else measure)(int(options.one), options.width, options.length)
        return
    # As in an installed package, no module is compiled while it is timed.
    compileall.compile_dir(Path(__file__).parents[1] / "rkmate", quiet=1)
    others = OTHERS if options.models is None else options.models.split(",")
    if options.gaps:
        print_gaps([*BENCHMARKED] if options.models is None else others)
        return
    if options.waits:
        names = [name for name in (*options.layers.split(","), *(options.models or "").split(",")) if name]
        print_waits(names, options.width, options.length, options.costs, options.repeats)
        return
    if options.profile:
        names = [name for name in (*options.layers.split(","), *others) if name]
        print_profiles(names, options.width, options.length)
        return
    print("| layers | captured / computations | blocks / unique | capture | measure | options | chain "
          "| cold | second budget | smallest | overhead at 1.0 / 0.7 / 0.5 / 0.35 "
          "| memory of planning / of a block |")
    print("|" + "---|" * 12)
    for layers in map(int, options.layers.split(",")):
        r = fresh(layers, options.width, options.length)
        memory = fresh(layers, options.width, options.length, "--memory")
        s, n = r["stages"], r["nodes"]
        over = " / ".join(f"{v:.1%}" for v in r["overheads"].values())
        print(f"| {layers} | {n['captured']} / {n['computations']} | {n['blocks']} / {n['unique']} "
              f"| {s['capture']:.1f} s | {s['measure']:.1f} s | {s['options']:.1f} s "
              f"| {max(0.0, s['chain'] - s['options']):.2f} s | {r['cold']:.1f} s | {r['second']:.2f} s "
              f"| {r['smallest']:.0%} | {over} "
              f"| {memory['planning'] / 2**20:.1f} / {memory['block'] / 2**20:.1f} MiB |", flush=True)


if __name__ == "__main__":
    main()
