"""Where no schedule of a model's graph fits a budget: the same graph with its heads split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate.budget import Budget
from rkmate.errors import InfeasibleBudget
from rkmate.graph.capture.capture import Source
from rkmate.ir.cd import Cost
from rkmate.pipeline.prepare import Prepared, prepare
from rkmate.pipeline.search import Searcher
from rkmate.show.plan import Plan
from rkmate.support.warn import warn

Found = TypeVar("Found")


def with_heads_split(prepared: Prepared, model: nn.Module, args: tuple[Any, ...] = (),
                     kwargs: Mapping[str, Any] | None = None, *,
                     costs: Sequence[Cost] | None = None,
                     tensors: Mapping[Source, torch.Tensor] | None = None) -> Prepared:
    """The same capture, its last product and cross entropy a few rows at a time."""
    return prepare(model, args, dict(kwargs or {}), replace(prepared.settings, split_head="always"),
                   prepared.progress, wanted=prepared.partition.program.joint.wanted, costs=costs,
                   captured=prepared.capture, tensors=tensors)


def fitting(prepared: Prepared, budget: Budget, search: Callable[[Prepared, Budget], Found],
            split: Callable[[], Prepared]) -> Found:
    """What `search` finds; where nothing fits, what it finds in `split()`, with a warning.

    A fraction is one of the peak of `prepared` in both.

    Raises:
        InfeasibleBudget: nothing fits in either; it says the smaller of their smallest budgets.
    """
    try:
        return search(prepared, budget)
    except InfeasibleBudget as error:
        if not prepared.can_split_heads:
            raise
        plain = error
    inside = Budget(bytes=budget.of(Searcher(prepared).baseline.peak))
    try:
        found = search(split(), inside)
    except InfeasibleBudget as error:
        raise min(plain, error, key=lambda e: e.minimum_bytes) from None
    _warn(prepared)
    return found


def fitting_curve(prepared: Prepared, budgets: Sequence[Budget] | None, planner: str,
                  split: Callable[[], Prepared]) -> list[Plan]:
    """A plan for each budget, as `fitting` finds them; without budgets, for ten between the peak of
    `prepared` and its smallest."""
    searcher = Searcher(prepared)
    high = searcher.baseline.peak
    if budgets is None:
        low = searcher.smallest.peak
        steps = [Budget(bytes=low + (high - low) * k // 9) for k in range(9, -1, -1)]
        return searcher.curve(steps, planner)
    limits = [Budget(bytes=b.of(high)) for b in budgets]
    fits, rest = sorted(set(limits), key=lambda b: b.bytes or 0), []
    while True:
        try:
            plans = dict(zip(fits, searcher.curve(fits, planner), strict=True))
            break
        except InfeasibleBudget:
            if not prepared.can_split_heads:
                raise
            rest.append(fits.pop(0))       # the smallest is the first that a curve plans
    if rest:
        plans |= zip(rest, Searcher(split()).curve(rest, planner), strict=True)
        _warn(prepared)
    return [plans[budget] for budget in limits]


def _warn(prepared: Prepared) -> None:
    names = ", ".join(prepared.partition.program.joint.heads)
    warn(
        f"nothing fits in this budget with the original's operations, so the product with {names} and "
        "its cross entropy are computed a few rows at a time. That weight's gradient is the original's "
        "but for the order of its additions: its last bits differ. "
        'rkmate.Settings(split_head="never") refuses such budgets')
