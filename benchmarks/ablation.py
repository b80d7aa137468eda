"""Each optional feature on and off: what it gives the eight benchmark models at three budgets.

Of each model, feature and budget, two plans: one with the feature and one without it, of one capture and
from the same costs, which are measured once (``--costs measured``) or counted (``--costs analytic``). A row
has the predicted seconds and peak of both plans, the processor seconds that each took to make from the
captured graph, and with ``--steps N`` the median seconds of N steps of each, taken in turns. *smallest* is
the smallest budget that can be met: each side's own is its peak there, and times are those of both at the
larger one of the two.

A feature is turned off here alone, by one of its settings, or by a row of a table or a function of the
package that is replaced while a plan is made (`FEATURES`). It stays if it gains `WORTH` on
`MODELS_WORTH` models at least.

Rows are appended to ``--rows FILE`` (JSON, one row a line; benchmarks/ablation.jsonl unless given), so that a
run can be broken off and taken up again: what is there is not planned again. ``--write`` makes
docs/ablation.md of that file. ``--small`` plans tiny models of the same kinds.

Usage: python benchmarks/ablation.py --costs analytic --models gpt unet --features dtr --budgets 0.5
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import fused
import tiles
import torch
import transformers
from beside import add_row, read_rows, step
from peers import DOCS, Case
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.budget import Budget
from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes import table as passes
from rkmate.ir.schedule import Schedule
from rkmate.measure import analytic
from rkmate.pipeline import search, variants
from rkmate.pipeline.attempts import Planned, bytes_of_deferred
from rkmate.pipeline.prepare import Traced, trace
from rkmate.planners import default, save_set
from rkmate.planners.fit import Fitted
from rkmate.planners.protocol import Candidate, Outcome, Problem, infeasible
from rkmate.planners.save_set import SaveSet
from rkmate.support.defaults import DEFAULT_PLANNER
from rkmate.support.progress import Progress

PAGE = DOCS / "ablation.md"
ROWS = Path(__file__).with_name("ablation.jsonl")
BUDGETS = ("1.0", "0.5", "smallest")
WORTH = 0.03
"""Part of a step's time, or of its memory, that a feature gains where it is worth its lines."""
MODELS_WORTH = 2
"""On how many models it does so, at least."""
TRIES = 4
"""How often the smallest budget is asked for anew, where the one that was named does not do."""
Off = Callable[[], AbstractContextManager[object]]


# -- Features --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """An optional feature, and what turns it off."""

    about: str
    off: Off = nullcontext
    """Makes a context in which plans are made, and steps compiled, without it."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `rkmate.Settings` that turn it off."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `rkmate.Settings` under which it is at work: both sides have them."""
    models: tuple[str, ...] = fused.NAMES
    """Models that it may concern."""
    concerns: str = ""
    """What these models have in common, where others have nothing for it to do."""
    stays: str = ""
    """Why it stays even where these figures do not say so; empty: it does not."""
    outputs_are_read: bool = False
    """Whether both sides are of a loop that reads each output of each step."""


def _mlp() -> Case:
    """Six blocks of two linear layers, and a mean squared error."""
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
    return _blocks(tiles.Blocks(blocks, F.mse_loss), (torch.randn(512, 256), torch.randn(512, 256)))


def _blocks(model: nn.Module, args: tuple[torch.Tensor, ...]) -> Case:
    return Case(model, dict(zip(("x", "y"), args, strict=True)), lambda m: [])


FURTHER: dict[str, Callable[[], Case]] = {"mlp": _mlp}
"""Models of which a feature says that it concerns them, in addition to those of the other benchmarks."""


class _Nothing:
    """A planner that finds nothing."""

    name = "nothing"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        return infeasible("not asked")


def _without_row(module: Any, table: str, name: str) -> Off:
    def off() -> AbstractContextManager[object]:
        rows = getattr(module, table)
        left = tuple(each for each in rows if each.name != name)
        if len(left) == len(rows):
            raise LookupError(f"{module.__name__}.{table} has no row {name!r}")
        return mock.patch.object(module, table, left)
    return off


def _without_strategy(origin: str) -> Off:
    def off() -> AbstractContextManager[object]:
        whole = default.table

        def table(*how: Any) -> tuple[default.Entry, ...]:
            entries = whole(*how)
            left = tuple(entry for entry in entries if entry.origin != origin)
            if len(left) == len(entries):
                raise LookupError(f"the default planner has no strategy {origin!r}")
            return left
        return mock.patch.object(default, "table", table)
    return off


def _without_save_set() -> AbstractContextManager[object]:
    """Its bound is gone, too, and the smallest budget is the chain's."""
    find, nothing = search.find_planner, _Nothing()
    return mock.patch.object(search, "find_planner",
                             lambda *how: replace(find(*how), save_set=nothing))  # type: ignore[type-var]


@contextmanager
def _without_fitting() -> Iterator[None]:
    """Under another name, as what a search has found is kept by its planner's name."""
    find, unfitted = search.find_planner, SaveSet("unfitted")
    with mock.patch.object(save_set, "fit", return_value=Fitted(None, 0)), mock.patch.object(
            search, "find_planner", lambda *how: replace(
                find(*how), save_set=unfitted)):  # type: ignore[type-var]
        yield


def _without(function: str, instead: Callable[..., Any]) -> Off:
    return lambda: mock.patch(f"rkmate.{function}", instead)


def _unfinished(problem: Problem, schedule: Schedule, budget: int) -> Candidate:
    result = problem.simulate(schedule)
    return Candidate(schedule, result.peak, result.seconds)


_HEADS = "output layers whose loss runs a few rows at a time"

FEATURES: dict[str, Feature] = {
    "order in blocks": Feature(
        "several orders of a block's operations are tried, and the one with the smallest peak is taken",
        _without("pipeline.prepare.reordered", lambda parts, stages=(): parts),
        models=(*fused.NAMES, "mlp")),
    "larger tiles": Feature(
        "the search runs again where larger tiles would be faster, to make room for them",
        _without("pipeline.attempts.with_larger_tiles", lambda plan, *how: plan)),
    "the chain": Feature("strategy of the default planner: the chain's dynamic program",
                         _without_strategy("rk-rotor")),
    "save-set": Feature("strategy of the default planner: the integer program on the whole graph",
                        _without_save_set,
                        stays="stays for its bound, from which a plan's gap comes"),
    "fitting": Feature(
        "a schedule of the integer program that needs more than the budget forgets what stands unused at its "
        "peak",
        _without_fitting),
    "finishing": Feature(
        "memory that a schedule leaves unused is spent on recomputations that can go",
        _without("planners.default.finished", _unfinished)),
    "tiles": Feature(
        "where nothing else fits, stretches of operations run a few images, rows or blocks of a sequence at "
        "a time", without={"tiles": "never"}),
    "grouped loss": Feature(
        "with gradients in place, a head runs in groups of rows, of which a schedule keeps some",
        _without_row(variants, "VARIANTS", "grouped-loss"),
        where={"gradients": "in_place"}, models=("gpt", "gpt12", "t5"), concerns=_HEADS),
    "ordinary outputs": Feature(
        "a module whose deferred outputs are read in every step is planned again, with ordinary ones",
        where={"deferred_outputs": "never"}, without={"deferred_outputs": "auto"},
        models=("gpt", "gpt12", "t5"), concerns=_HEADS, outputs_are_read=True),
    "products of pixels": Feature(
        "with the channels last, convolutions of 1 x 1 are products of matrices",
        _without_row(passes, "REWRITES", "products of pixels"),
        where={"layouts": "channels_last"}, models=fused.CONVOLUTIONS, concerns="convolutions"),
}
"""What turns each of them off, by name."""


TAKEN_OUT: dict[str, str] = {
    "pages of up to 32 MiB that planned modules kept":
        "time of eager's, without and with ([`keep_pages()`](pages.md) keeps all): GPT-2 at 100% 0.90 and "
        "0.91, at 50% 0.90 and 0.98; ResNet-50 at 100% 0.97 and 0.96, at 50% 1.07 and 1.07",
    "files of compiled groups":
        "a second process loads groups without the compiler; from inductor's own cache, this takes some 2 s "
        "of processor time for the compiler and 0.03 s for each group, of "
        "[3 to 10 s until it is ready](fused.md)",
    "temporary memory of sums on GPUs that are not here":
        "up to 132 MiB on an H100; none of these models is planned for one",
    "partial saves (a forward kept data for a later forward of the same block, in the chain's program)":
        "the rows below: 3.2% of one model's step at one budget (ResNet-18 at 0.4), and 12% lost on "
        "ResNet-50 at its smallest budget",
    "the policy of DTR and the lower-set program among the default planner's strategies":
        "the rows below: 0.5% and 1.3% of one model's step at one budget; both are planners by themselves",
    "scales behind products (tiles of columns multiplied by a root mean square norm's scales behind their "
    "products)":
        "the rows below: the smallest budget of two Llama blocks in plain PyTorch with 8,192 tokens was 20% "
        "smaller, and no other figure of a model changed",
    "sums over pixels (with the channels last, batch norms of large images added up groups of pixels)":
        "the rows below: nothing on any model; statistics have the bits of torch's own kernel for this "
        "layout, which are some fifty times less exact than in the other layout",
    "tiled MLPs (the two products of an MLP, and what is between them, ran a few rows at a time)":
        "the rows below: one model at its smallest budget (ViT), which tiles of images meet, too, since "
        "they leave the model's images out of what its first convolution takes",
    "products by oneDNN":
        "in compiled plans, on some processors, one took a tenth less; no figure of a model",
}
"""Features that are gone, which this benchmark does not plan, with the figures by which they were judged."""
ELSEWHERE: dict[str, str] = {
    "repeated layers traced once":
        "GPT-2 of 12 and 48 layers: the capture takes 1.9 and 2.4 processor seconds instead of 3.7 and 11.5 "
        "([planning](benchmarks.md#planning-by-depth))",
    "plans on disk":
        "a second process plans in half a second beyond its capture "
        "([planning](benchmarks.md#planning-by-depth))",
}
"""Features that change neither times nor peaks, and are judged by other figures."""


# -- Plans with and without ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A feature on one model at one budget. None stands where a side has no plan, or was not measured."""

    model: str
    feature: str
    budget: str
    costs: str
    whole: int
    """Bytes: the peak of the step without rematerialization, of which budgets are parts."""
    on_seconds: float | None = None
    on_peak: int | None = None
    """At the smallest budget, that budget."""
    on_planning: float | None = None
    """Processor seconds."""
    off_seconds: float | None = None
    off_peak: int | None = None
    off_planning: float | None = None
    on_step: float | None = None
    """The median of measured steps, in seconds."""
    off_step: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from other rows."""
        return self.model, self.feature, self.budget, self.costs

    @property
    def time(self) -> float | None:
        """Of a step, off to on; inf where the budget cannot be met without the feature."""
        return _ratio(self.off_seconds, self.on_seconds)

    @property
    def peak(self) -> float | None:
        """Off to on. Within a part of the whole peak, both sides use up the budget, and it means nothing,
        unless the one without the feature takes more."""
        limit = math.inf if self.budget == "smallest" else float(self.budget) * self.whole
        if limit < self.whole and (self.off_peak is None or self.off_peak <= limit):
            return None
        return _ratio(self.off_peak, self.on_peak)

    @property
    def gain(self) -> float:
        """Part of the time or of the memory without the feature that it spares, the larger one."""
        ratios = self.time, self.peak, _ratio(self.off_step, self.on_step)
        return max(0.0, max((1 - 1 / r for r in ratios if r), default=0.0))


def _ratio(off: float | None, on: float | None) -> float | None:
    if on is None:
        return None
    return math.inf if off is None else off / on


@dataclass(frozen=True)
class _Side:
    """A plan, or None, and the processor seconds that it took to find."""

    planned: Planned | None
    planning: float
    least: int = 0
    """Bytes that it needs at least, where there is none."""


def _made(model: str, *, small: bool) -> Case:
    """A model for training, the same each time."""
    if model in fused.NAMES:
        return fused.made(model, small=small)
    torch.manual_seed(0)
    found = FURTHER[model]()
    found.model.train()
    return found


class Bench:
    """Plans of one model."""

    def __init__(self, model: str, costs: str, *, small: bool, patience: float) -> None:
        self.model, self.costs, self.patience = model, costs, patience
        self.case = _made(model, small=small)
        self._traced: dict[str, Traced] = {}
        self._found: dict[tuple[str, Budget], _Side] = {}

    def row(self, feature: str, budget: str, steps: int) -> Row:
        """One feature at one budget."""
        how = FEATURES[feature]
        row, sides = self._counted(feature, budget)
        plans = [side.planned.plan for side in sides if side.planned is not None]
        if not steps or how.outputs_are_read or len(plans) < 2:
            return row
        on, off = self._steps(how, plans, steps)
        return replace(row, on_step=on, off_step=off)

    def _counted(self, feature: str, budget: str) -> tuple[Row, tuple[_Side, _Side]]:
        how = FEATURES[feature]
        base = self._side(how, on=True, budget=Budget(fraction=1.0)).planned
        assert base is not None
        row = Row(self.model, feature, budget, self.costs, base.plan.budget_bytes)
        if budget == "smallest":
            return self._at_smallest(how, row)
        limit = Budget(bytes=int(float(budget) * row.whole))
        on, off = (self._side(how, on=on, budget=limit) for on in (True, False))
        return replace(row, on_seconds=self._seconds(how, on, on=True), on_peak=self._peak(how, on, on=True),
                       on_planning=on.planning, off_seconds=self._seconds(how, off, on=False),
                       off_peak=self._peak(how, off, on=False), off_planning=off.planning), (on, off)

    def _at_smallest(self, how: Feature, row: Row) -> tuple[Row, tuple[_Side, _Side]]:
        """Each side at its own smallest budget, and the one with the smaller one at the other's, too."""
        found = [self._smallest(how, on=on) for on in (True, False)]
        row = replace(row, on_peak=found[0][0], on_planning=found[0][2], off_peak=found[1][0],
                      off_planning=found[1][2])
        limit, sides = max(least for least, _, _ in found), []
        for (least, own, _), on in zip(found, (True, False), strict=True):
            here = own if least == limit else self._side(how, on=on, budget=Budget(bytes=limit))
            # A search that is cut short may find less where there is more room.
            sides.append(min(own, here, key=lambda side: math.inf if side.planned is None
                             else side.planned.plan.step_seconds))
        return replace(row, on_seconds=self._seconds(how, sides[0], on=True),
                       off_seconds=self._seconds(how, sides[1], on=False)), (sides[0], sides[1])

    def _smallest(self, how: Feature, *, on: bool) -> tuple[int, _Side, float]:
        """The smallest budget that can be met, in bytes, its plan, and the seconds that it took to find. No
        plan, where the budget that is named as the smallest is not met."""
        limit, side = 1, self._side(how, on=on, budget=Budget(bytes=1))
        spent = side.planning
        for _ in range(TRIES):
            if side.planned is not None:
                break
            limit = side.least
            side = self._side(how, on=on, budget=Budget(bytes=limit))
            spent += side.planning
        return limit, side, spent

    def _side(self, how: Feature, *, on: bool, budget: Budget) -> _Side:
        """A plan with a feature, which others share, or without it."""
        settings = dict(how.where) if on else {**how.where, **how.without}
        key = repr(sorted(settings.items()))
        if on and (key, budget) in self._found:
            return self._found[key, budget]
        traced = self._trace(key, settings)
        with nullcontext() if on else how.off():
            if self.costs == "measured":
                self._plan(traced, budget)          # whatever is not measured yet
            found = self._plan(traced, budget)
        if on:
            self._found[key, budget] = found
        return found

    def _plan(self, traced: Traced, budget: Budget) -> _Side:
        for kept in ("options", "plans"):
            shutil.rmtree(Path(os.environ["RKMATE_CACHE_DIR"]) / kept, ignore_errors=True)
        start = time.process_time()
        with _quiet():
            try:
                planned = search.make_plan(traced, budget, DEFAULT_PLANNER)
            except rkmate.InfeasibleBudget as error:
                return _Side(None, time.process_time() - start, error.minimum_bytes or 0)
        return _Side(planned, time.process_time() - start)

    def _trace(self, key: str, more: Mapping[str, Any]) -> Traced:
        if key not in self._traced:
            settings = self.settings(more)
            first = next(iter(self._traced.values()), None)
            if first is not None and not settings.compile:      # the same capture
                self._traced[key] = replace(first, settings=settings)
            else:
                with _quiet():
                    self._traced[key] = trace(self.case.model, (), self.case.kwargs, settings,
                                              Progress(False))
        return self._traced[key]

    def settings(self, more: Mapping[str, Any]) -> rkmate.Settings:
        """Default settings with some others, whose searches have time where others use the machine, too."""
        settings = rkmate.Settings(costs=self.costs, **more)    # type: ignore[arg-type]
        p, planner, options = self.patience, settings.of_planner, settings.options
        return replace(
            settings,
            planner=replace(planner, save_set_seconds=p * planner.save_set_seconds,
                            first_seconds=p * planner.first_seconds, deep_seconds=p * planner.deep_seconds,
                            smallest_seconds=p * planner.smallest_seconds),
            options=replace(options, time_limit=p * options.time_limit, block_limit=p * options.block_limit,
                            total_limit=p * options.total_limit))

    def _seconds(self, how: Feature, side: _Side, *, on: bool) -> float | None:
        """Of a step, and where its outputs are read, of what computes them then."""
        if side.planned is None:
            return None
        later = 0.0
        if how.outputs_are_read and not on:
            later = sum(analytic.seconds_of(node)
                        for deferred in side.planned.prepared.partition.program.joint.deferred
                        for node in deferred.graph.nodes if node.op == "call_function" and not is_view(node))
        return side.planned.plan.step_seconds + later

    def _peak(self, how: Feature, side: _Side, *, on: bool) -> int | None:
        if side.planned is None:
            return None
        read = how.outputs_are_read and not on
        return side.planned.plan.peak_bytes + (
            bytes_of_deferred(side.planned.prepared.blocked) if read else 0)

    def _steps(self, how: Feature, plans: Sequence[rkmate.Plan], count: int) -> tuple[float, float]:
        """Median seconds of steps that follow two plans, in turns."""
        modules = []
        for plan, on in zip(plans, (True, False), strict=True):
            settings = self.settings({**how.where, **({} if on else how.without)})
            with _quiet(), nullcontext() if on else how.off():
                modules.append(rkmate.wrap(self.case.model, (), self.case.kwargs, plan=plan, progress=False,
                                           settings=settings))
        times: list[list[float]] = [[], []]
        for _ in range(count + 1):
            for module, taken in zip(modules, times, strict=True):
                taken.append(step(lambda module=module: module(**self.case.kwargs).loss, self.case.model))
        on, off = (statistics.median(taken[1:]) for taken in times)
        return on, off


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rkmate.RkmateWarning)
        yield


def run(models: Sequence[str], features: Sequence[str], budgets: Sequence[str], path: Path | None, *,
        costs: str, steps: int = 0, small: bool = False, patience: float = 1.0) -> list[Row]:
    """Plan what is not in the file yet. Returns all of its rows."""
    rows = read_rows(Row, path)
    known = {row.key for row in rows}
    for model in models:
        bench = functools.cache(functools.partial(Bench, model, costs, small=small, patience=patience))
        for feature in features:
            how = FEATURES[feature]
            if model not in how.models:
                continue
            for budget in budgets:
                if (model, feature, budget, costs) not in known:
                    rows.append(bench().row(feature, budget, steps))
                    add_row(rows[-1], path)
    return rows


# -- The page --------------------------------------------------------------------------------------


def worth_on(rows: Sequence[Row]) -> list[str]:
    """The models on which a feature gains enough. `rows`: of that feature."""
    return list(dict.fromkeys(row.model for row in rows if row.gain >= WORTH))


def verdicts(rows: Sequence[Row]) -> str:
    """The table of verdicts, in Markdown."""
    lines = ["| feature | largest gain | gains 3% on | processor seconds of planning, with | "
             "without | verdict |", "|---|---|---|--:|--:|---|"]
    for name, how in FEATURES.items():
        own = [row for row in rows if row.feature == name]
        if not own:
            continue
        most, models = max(own, key=lambda row: row.gain), worth_on(own)
        gains = f"{_part(most.gain)} ({most.model}, {most.budget})" if most.gain >= 0.0005 else "nothing"
        keeps = len(models) >= MODELS_WORTH
        missing = [model for model in how.models if not any(row.model == model for row in own)]
        verdict = "stays" if keeps else f"open ({', '.join(missing)} not planned yet)" if missing \
            else how.stays or "does not stay"
        on, off = (sum(s or 0.0 for s in found) for found in zip(
            *((row.on_planning, row.off_planning) for row in own), strict=True))
        lines.append(f"| {name} | {gains} | {', '.join(models) or 'none'} | {on:.0f} | {off:.0f} | "
                     f"{verdict} |")
    return "\n".join(lines)


def _part(gain: float) -> str:
    return "cannot be met without it" if gain == 1 else f"{gain:.1%}"


def table(rows: Sequence[Row]) -> str:
    """The rows of one feature, in Markdown."""
    steps, both = any(row.on_step is not None for row in rows), len({row.costs for row in rows}) > 1
    lines = [f"| model | budget |{' costs |' if both else ''} predicted time, off / on | predicted peak, "
             f"off / on |{' measured time, off / on |' if steps else ''} planning, on | off |",
             f"|---|---|{'---|' if both else ''}--:|--:|{'--:|' if steps else ''}--:|--:|"]
    for row in rows:
        measured = f" {_said(_ratio(row.off_step, row.on_step))} |" if steps else ""
        costs = f" {row.costs} |" if both else ""
        lines.append(f"| {row.model} | {row.budget} |{costs} {_said(row.time)} | {_said(row.peak)} |"
                     f"{measured} {_seconds(row.on_planning)} | {_seconds(row.off_planning)} |")
    return "\n".join(lines)


def _said(ratio: float | None) -> str:
    return "" if ratio is None else "not met" if math.isinf(ratio) else f"{ratio:.3f}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def page(rows: Sequence[Row]) -> str:
    """The page of the documentation."""
    costs = sorted({row.costs for row in rows})
    parts = [
        "# What each feature gives\n",
        "Each optional feature on and off: two plans of the same captured model from the same costs, at the "
        "whole peak (1.0), at half of it, and at the smallest budget that can be met. Ratios are the value "
        "without the feature divided by the value with it: above 1, the feature is an improvement. At the "
        "smallest budget, the peaks are the smallest budgets with and without it, and the times are those "
        "at the larger of the two. *Not met*: there is no plan without the feature. Planning "
        f"is in processor seconds, from the captured graph. Costs are {' or '.join(costs)} ones. Times and "
        "peaks are predicted. Analytic costs show what a plan gains, but no differences between kernels that "
        "have the same counted costs. Made by `python benchmarks/ablation.py --write` from "
        "`benchmarks/ablation.jsonl`.\n",
        f"A feature stays if it gains at least {WORTH:.0%} of the time or memory of a step on at "
        f"least {MODELS_WORTH} models.\n",
        "## Verdicts\n", verdicts(rows) + "\n"]
    gone = [f"| {name} | {figures} |" for name, figures in TAKEN_OUT.items()]
    parts += ["Features that were removed, with the figures that decided:\n",
              "\n".join(["| feature | figures |", "|---|---|", *gone]) + "\n",
              "Features that change neither times nor peaks:\n",
              "\n".join(["| feature | figures |", "|---|---|",
                         *(f"| {name} | {figures} |" for name, figures in ELSEWHERE.items())]) + "\n"]
    for name in dict.fromkeys(row.feature for row in rows):
        about = _about(FEATURES[name]) if name in FEATURES else "Removed."
        parts += [f"## {name[0].upper()}{name[1:]}\n", f"{about}\n",
                  table([row for row in rows if row.feature == name]) + "\n"]
    return "\n".join(parts)


def _about(feature: Feature) -> str:
    """What a feature does, and which models it concerns, where these are not all."""
    text = f"{feature.about[0].upper()}{feature.about[1:]}."
    others = [name for name in fused.NAMES if name not in feature.models]
    return text if not feature.concerns else \
        f"{text} It concerns {feature.concerns}; in {', '.join(others)}, there is nothing for it to do."


def main() -> None:
    """Plan, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(*fused.NAMES, *FURTHER),
                        default=(*fused.NAMES, *FURTHER))
    parser.add_argument("--features", nargs="+", choices=tuple(FEATURES), default=tuple(FEATURES))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS, help="parts of the whole peak, and smallest")
    parser.add_argument("--costs", choices=("measured", "analytic"), default="measured")
    parser.add_argument("--steps", type=int, default=0, help="measured, of each side; none by default")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of rows, read and appended to")
    parser.add_argument("--patience", type=float, default=1.0,
                        help="by which the seconds of searches are multiplied, where others use the machine")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--write", action="store_true", help="docs/ablation.md, and nothing else")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.write:
        PAGE.write_text(page(read_rows(Row, options.rows)), encoding="utf-8")
        return
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if "RKMATE_CACHE_DIR" not in os.environ:
            os.environ["RKMATE_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        rows = run(options.models, options.features, options.budgets, options.rows, costs=options.costs,
                   steps=options.steps, small=options.small, patience=options.patience)
    asked = [row for row in rows if row.model in options.models and row.feature in options.features]
    print(f"\n{verdicts(asked)}")


if __name__ == "__main__":
    main()
