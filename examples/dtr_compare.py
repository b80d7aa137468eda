"""Train a dynamic model in eager mode and inside budgets, step by step, and compare.

Every step's gradients must equal eager's bit for bit, and its exact peak must stay inside the
budget (without the gradients that the step leaves). The four examples in this folder use it:

    python examples/dtr_treelstm.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import rkmate.dtr
from rkmate.measure.step import measure_peak

RATIOS = (1.0, 0.6, 0.4)


@dataclass(frozen=True)
class Task:
    """A model and its training step; both must be the same at every call with the same seed."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    """The loss of one step, given the step's number."""


@dataclass(frozen=True)
class Row:
    """One budget's steps; times are the sum over the steps of each step's best of three."""

    name: str
    ratio: float
    equal: bool
    peak_over_budget: float
    eager_seconds: float
    seconds: float
    operations: int
    evictions: int
    rematerializations: int
    bookkeeping_seconds: float
    recompute_seconds: float


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _step(task: Task, model: nn.Module, number: int) -> None:
    torch.manual_seed(number)
    model.zero_grad(set_to_none=True)
    task.loss(model, number).backward()


def _best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def compare(
    task: Task,
    ratios: tuple[float, ...] = RATIOS,
    steps: int = 3,
    heuristic: str = "dtr-eq",
    overhead_limit: float = 50.0,
) -> list[Row]:
    """Train ``steps`` steps under each ratio of the step's own peak."""
    rows = []
    for ratio in ratios:
        torch.manual_seed(0)
        model = task.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        equal, worst, eager_seconds, seconds = True, 0.0, 0.0, 0.0
        reports = []
        for number in range(steps):
            _step(task, model, number)
            model.zero_grad(set_to_none=True)
            own = measure_peak(lambda n=number: _step(task, model, n)).peak
            expected = _gradients(model)
            held = sum(g.nbytes for g in expected)
            eager_seconds += _best(lambda n=number: _step(task, model, n))
            budget = int(own * ratio)

            def inside(n: int = number, budget: int = budget) -> rkmate.dtr.Report:
                with rkmate.dtr(budget, heuristic, overhead_limit=overhead_limit) as session:
                    _step(task, model, n)
                return session.report

            inside()
            seconds += _best(inside)
            model.zero_grad(set_to_none=True)
            seen = measure_peak(inside)
            reports.append(seen.result)
            found = _gradients(model)
            equal &= len(found) == len(expected) and all(map(torch.equal, found, expected))
            worst = max(worst, (seen.peak - held) / budget)
            optimizer.step()
        rows.append(
            Row(
                name=task.name,
                ratio=ratio,
                equal=equal,
                peak_over_budget=worst,
                eager_seconds=eager_seconds,
                seconds=seconds,
                operations=sum(r.operations for r in reports),
                evictions=sum(r.evictions for r in reports),
                rematerializations=sum(r.rematerializations for r in reports),
                bookkeeping_seconds=sum(r.bookkeeping_seconds for r in reports),
                recompute_seconds=sum(r.recompute_seconds for r in reports),
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    """Print the rows as a table in Markdown."""
    print(
        "| model | budget | gradients | peak / budget | time / eager | operations | evictions "
        "| run again |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.name} | {row.ratio:.0%} | {'equal' if row.equal else 'DIFFERENT'} "
            f"| {row.peak_over_budget:.3f} | {row.seconds / row.eager_seconds:.2f} "
            f"| {row.operations} | {row.evictions} | {row.rematerializations} |"
        )
