"""Run every planner on one model at the same budgets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from torch import nn

from rkmate.api import checked_sample
from rkmate.budget import Budget, listed, parse_budget
from rkmate.comparison.measured import Bench
from rkmate.comparison.table import Comparison, Row
from rkmate.errors import ArgumentError, ScheduleError, SolverError
from rkmate.pipeline.attempts import attempted
from rkmate.pipeline.device_budget import auto_budget
from rkmate.pipeline.loss import trains_of
from rkmate.pipeline.model import as_before, flags_to_plan
from rkmate.pipeline.prepare import prepare, trace
from rkmate.pipeline.refuse import limit_of
from rkmate.pipeline.solve import Solved, solve
from rkmate.planners.protocol import Candidate, Composed, Planner
from rkmate.planners.registry import PLANNERS, asks
from rkmate.planners.registry import planner as find_planner
from rkmate.settings import Options, check_default_planner
from rkmate.settings import chosen as merged
from rkmate.show.amounts import size
from rkmate.show.plan import Plan
from rkmate.support.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
"""Fractions of the model's own peak."""
TIME_LIMIT = 20.0
"""Seconds that a planner has for one budget."""


def compare(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
            budgets: Sequence[int | float | str] = BUDGETS, planners: Sequence[str] | None = None,
            measure: bool = False, time_limit: float = TIME_LIMIT, **options: Unpack[Options]) -> Comparison:
    """Run every planner on one model at equal budgets.

    Capturing, measuring and solving the options of blocks are done once for all planners. One simulator
    predicts the peak and the time of each schedule. All planners work on one graph: the settings' first
    variant (with ``chunked_loss="always"``, the variant with a chunked loss).

    Args:
        model: the module; a model in eval mode is planned in train mode.
        args, kwargs: sample inputs of its forward, of the size that it will be trained with.
        budgets: each as for `rkmate.wrap`: bytes, text, a fraction of the model's own peak, or
            ``"auto"``.
        planners: names of planners; by default all except ``auto``, which runs the others.
        measure: also train a step under each schedule, in a separate process, alternating with the
            original model, and record peak and time. Adds rows for the original model, and for
            ``torch.utils.checkpoint.checkpoint_sequential`` if the model is an ``nn.Sequential``.
            The loss is computed from the output: its ``loss``, else its scalars, else the mean of its
            tanh. Your script then needs an ``if __name__ == "__main__":`` guard.
        time_limit: seconds for one budget, for a planner that can stop early.
        options: `rkmate.Options`, as for `rkmate.wrap`. With `calls`, budgets and peaks are for steps that
            call the model that often before the backward. With ``Settings(costs="analytic")`` nothing is run,
            and costs are the same on every machine. (Schedules may still differ between machines: integer
            programs, also the default planner's, have limits in seconds.)

    Returns:
        Rows that print as a table and draw as a picture. A planner without a schedule has a row that says
        so, and raises no error. A schedule found for one budget also counts for larger budgets.

    Raises:
        ArgumentError: an argument is wrong; with `measure`, also a model that cannot be pickled.
        CaptureError: the model has no static graph.
    """
    call = merged(options, compare)
    settings, shown = call.settings, Progress(call.progress)
    check_default_planner(settings, "compare asks every planner, or those that planners= names")
    args, kwargs = checked_sample(model, args, kwargs)
    wanted = [parse_budget(auto_budget(model) if isinstance(b, str) and b == "auto" else b)
              for b in listed(budgets, "budgets", "budgets")]
    methods = [find_planner(n) for n in ([n for n in PLANNERS if n != "auto"] if planners is None
                                         else listed(planners, "planners", "names of planners"))]
    if not time_limit > 0:
        raise ArgumentError(f"time_limit is {time_limit}; it should be a positive number of seconds")
    methods = [find_planner(m.name, settings.of_planner) for m in methods]
    with flags_to_plan(model, None), as_before(model):
        prepared = prepare(trace(model, args, kwargs, settings, shown))
        solved = solve(prepared)                     # the options of the blocks, and the chain
        shared = {k: v for k, v in solved.stage_seconds.items() if k != "chain"}
        found = _planned(solved, wanted, methods, time_limit, shown)
        rows = [row for row, _ in found]
        if measure:
            chosen = trains_of(model, prepared.capture, settings.trains)
            bench = Bench(model, args, kwargs, replace(settings, trains=chosen))
            rows = _measured(bench, found, shown)
    return Comparison(tuple(rows), type(model).__name__, settings.costs, prepared.baseline_peak,
                      prepared.baseline.seconds, shared)


def _planned(solved: Solved, budgets: Sequence[Budget], methods: Sequence[Planner],
             time_limit: float, progress: Progress) -> list[tuple[Row, Plan | None]]:
    """Return rows and plans in the caller's order. The planning goes from the smallest budget up, as what was
    found for one serves those above."""
    limits = list(dict.fromkeys(limit_of(solved.prepared, budget) for budget in budgets))
    made: dict[tuple[int, int], tuple[Row, Plan | None]] = {}
    best: dict[int, Plan] = {}
    known: dict[int, tuple[Candidate, ...]] = {}
    done: list[tuple[str, float]] = []
    order = [(limit, k) for limit in sorted(limits) for k in _turns(methods)]
    with progress.tasks("planning", len(order)) as tasks:
        for limit, k in order:
            coming = [methods[other].name for _, other in order[len(done):]]
            tasks.begin(f"{methods[k].name} within {size(limit)}", seconds_left(done, coming))
            row, plan, more = _row(solved, limit, methods[k], time_limit, known.get(k))
            if more is not None and isinstance(methods[k], Composed):
                known[k] = (*known.get(k, ()), *more)
            before = best.get(k)
            row, plan = made[limit, k] = _at_least(row, plan, before)
            if plan is not None and (before is None or plan.step_seconds < before.step_seconds):
                best[k] = plan
            done.append((methods[k].name, row.planning_seconds or 0.0))
            tasks.done()
    return [made[limit, k] for limit in limits for k in range(len(methods))]


def _turns(methods: Sequence[Planner]) -> list[int]:
    """Return the order in which planners run: a planner that asks others comes after them, so that each pays
    for its own work."""
    places = list(PLANNERS)
    return sorted(range(len(methods)), key=lambda k: (asks(methods[k]), places.index(methods[k].name)))


def _at_least(row: Row, plan: Plan | None, before: Plan | None) -> tuple[Row, Plan | None]:
    """Return a planner's row, or where it is slower than its plan of a smaller budget, that plan's."""
    if before is None or row.status == "failed" or row.budget_bytes is None or (
            plan is not None and plan.step_seconds <= before.step_seconds):
        return row, plan
    kept = replace(before, budget_bytes=row.budget_bytes,
                   bound_seconds=None if plan is None else plan.bound_seconds)
    return replace(row, status="ok", peak_bytes=kept.peak_bytes, time_ratio=_ratio(kept),
                   note=f"as within {before.budget_bytes:,} bytes"), kept


def _row(solved: Solved, limit: int, method: Planner, time_limit: float,
         known: Sequence[Candidate] | None) -> tuple[Row, Plan | None, tuple[Candidate, ...] | None]:
    """Return a row, its plan, and the schedules that further budgets should know; None: it was not
    searched."""
    name, start = method.name, time.perf_counter()
    try:
        attempt = attempted(solved.prepared, solved, method, limit, time_limit=time_limit, known=known)
    except (SolverError, ScheduleError) as error:
        return Row(name, limit, "failed", time.perf_counter() - start, note=str(error)), None, None
    seconds = time.perf_counter() - start
    plan = attempt.plan
    if plan is None:
        return Row(name, limit, attempt.status, seconds, note=attempt.note), None, attempt.found
    return Row(name, limit, "ok", seconds, plan.peak_bytes, _ratio(plan), note=attempt.note), plan, \
        attempt.found


def _ratio(plan: Plan) -> float:
    return plan.step_seconds / plan.baseline_seconds if plan.baseline_seconds else 1.0


def _measured(bench: Bench, found: Sequence[tuple[Row, Plan | None]],
              progress: Progress) -> list[Row]:
    """Return the rows with what was measured, and those of what people use without this package."""
    rows: list[Row] = []
    done: list[tuple[str, float]] = []
    number = sum(plan is not None for _, plan in found) + 1
    with bench, progress.tasks("measuring steps", number) as tasks:
        for row, plan in found:
            if plan is None:
                rows.append(row)
                continue
            budget = "" if row.budget_bytes is None else f" within {size(row.budget_bytes)}"
            tasks.begin(f"{row.method}{budget}", seconds_left(done, ["step"] * (number - len(done))))
            start = time.perf_counter()
            rows.append(bench.measured(row, plan))
            done.append(("step", time.perf_counter() - start))
            tasks.done()
        tasks.begin("what people use without rkmate", seconds_left(done, ["step"]))
        rows += bench.today()
        tasks.done()
    return rows


def seconds_left(done: Sequence[tuple[str, float]], coming: Sequence[str]) -> float | None:
    """Return seconds of the tasks that come: each as long as its method's mean so far, or the mean of all
    where its method has not run. None while nothing is done.

    `done`: (method, seconds). A planner takes about as long for one budget as for the next, and planners
    differ by three orders of magnitude: one rate for all of them would say nothing.
    """
    if not done:
        return None
    every = mean(seconds for _, seconds in done)
    own: dict[str, list[float]] = {}
    for method, seconds in done:
        own.setdefault(method, []).append(seconds)
    return sum(mean(own[m]) if m in own else every for m in coming)
