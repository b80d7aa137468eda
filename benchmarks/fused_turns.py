"""All methods on one model in one process: every round takes one step of each.

A machine's speed moves from minute to minute, by more than what is to be told apart here. Methods whose steps
take turns share it.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from beside import Forward, peak_of, step
from fused_rows import Turn, Turns, smallest
from peers import Case, budgeted

import rkmate

BATCHES = 5
"""On which gradients are compared."""
LEAST_ROUNDS = 7
SECONDS = 4
"""Of steps, for each method and on average, at least."""


def in_format(kwargs: dict[str, Any], form: torch.memory_format) -> dict[str, Any]:
    """The arguments, with images of a layout."""
    return {k: v.contiguous(memory_format=form) if v.dim() == 4 else v for k, v in kwargs.items()}


def asked(method: str, case: Case, eager_peak: int, plan: Path | None = None
          ) -> tuple[Forward, rkmate.Plan | None]:
    """A forward by some method, whose budget is a number. `plan`: where rkmate's plan is, or will be."""
    kind, *more = method.split()
    model, kwargs = case.model, case.kwargs
    if kind == "inductor":
        return budgeted(case, kind, float(more[0])), None
    if kind == "eager":
        if more:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            case.kwargs.update(in_format(kwargs, torch.channels_last))
        return lambda: model(**kwargs).loss, None
    how: dict[str, Any] = {"budget": round(float(more[-1]) * eager_peak)}
    if plan is not None and plan.exists():
        how = {"plan": rkmate.Plan.load(plan)}
    settings = rkmate.Settings(layouts="auto" if "layouts" in more else "keep", compile="compile" in more)
    wrapped = rkmate.wrap(model, (), kwargs, progress=False, settings=settings, **how)
    if plan is not None:
        wrapped.plan.save(plan)
    return lambda: wrapped(**kwargs).loss, wrapped.plan


class Exactness:
    """How far the gradients of a model are from those in double precision, over several batches: one number
    that a ReLU cuts off here and lets through there moves all gradients before it."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [{k: v.clone() for k, v in case.kwargs.items()}]
        for _ in range(BATCHES - 1):        # one tensor may stand for two inputs
            orders = {id(v): torch.randperm(v.numel(), generator=generator) for v in case.kwargs.values()}
            self._batches.append({k: v.flatten()[orders[id(v)]].view(v.shape)
                                  for k, v in case.kwargs.items()})
        model = copy.deepcopy(case.model).double()
        self._exact = []
        for batch in self._batches:
            kwargs = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            step(lambda kwargs=kwargs: model(**kwargs).loss, model)
            self._exact.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    def error(self, forward: Forward, case: Case) -> float:
        """The norm of what is wrong in the gradients of all batches, relative to that of the exact ones.
        `forward` reads the inputs of the case, which are what they were in the end."""
        wrong = norm = 0.0
        for batch, exact in list(zip(self._batches, self._exact, strict=True))[::-1]:
            for name, value in case.kwargs.items():
                value.copy_(batch[name])
            step(forward, case.model)
            for p, e in zip(case.model.parameters(), exact, strict=True):
                if p.grad is not None and e is not None:
                    wrong += float((p.grad.double() - e).square().sum())
                    norm += float(e.square().sum())
        return math.sqrt(wrong / norm)


def in_turns(model: str, threads: int, methods: Sequence[str], made_case: Callable[[], Case],
             least_rounds: int = LEAST_ROUNDS, seconds: float = SECONDS) -> Turns:
    """Measure methods on one model. ``inductor`` as a budget is the smallest peak of torch.compile's rows,
    which come before. The first method is eager's."""
    if methods[0] != "eager":
        raise ValueError("eager comes first: all others are measured by it")
    torch.set_num_threads(threads)
    reference = made_case()
    level = peak_of(lambda: reference.model(**reference.kwargs).loss, reference.model)
    exactness = Exactness(reference)
    eager_error = exactness.error(lambda: reference.model(**reference.kwargs).loss, reference)
    found: Turns = {}
    ways: dict[str, tuple[Forward, Case]] = {}
    for method in methods:
        row = Turn(model, method, threads, eager_bytes=level, eager_error=eager_error)
        case, budget = made_case(), method
        if method.startswith("rkmate") and method.endswith(" inductor"):
            theirs = smallest(model, threads, found)
            if theirs is None:
                raise ValueError(f"{method!r} needs the peaks of inductor on {model}, measured before it")
            budget = method.removesuffix("inductor") + str(theirs.peak)
        try:
            forward, plan = asked(budget, case, level)
        except rkmate.InfeasibleBudget as error:
            found[row.key] = replace(row, failed=f"infeasible: at least {error.minimum_bytes / level:.1%}")
            continue
        peak = peak_of(forward, case.model)
        row = replace(row, peak=peak / level, error=exactness.error(forward, case))
        if plan is not None:
            row = replace(row, predicted_peak=plan.peak_bytes / level, predicted_seconds=plan.step_seconds,
                          variant=plan.variant)
        found[row.key] = row
        ways[method] = forward, case
    del exactness
    taken: dict[str, list[float]] = {method: [] for method in ways}
    start, rounds = time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() - start < seconds * len(ways):
        for method, (forward, case) in ways.items():
            taken[method].append(step(forward, case.model))
        rounds += 1
    medians = {method: statistics.median(times) for method, times in taken.items()}
    return {key: row if row.failed else replace(row, seconds=medians[row.method], rounds=rounds,
                                                eager_seconds=medians["eager"])
            for key, row in found.items()}
