"""Where no schedule of a model's graph fits a budget: the same graph with its heads split."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate.errors import InfeasibleBudget, RkmateWarning
from rkmate.graph.capture import Source
from rkmate.pipeline import Prepared, prepare

Found = TypeVar("Found")


def with_heads_split(prepared: Prepared, model: nn.Module, args: tuple[Any, ...] = (),
                     kwargs: Mapping[str, Any] | None = None, *,
                     costs: Sequence[tuple[float, int]] | None = None,
                     tensors: Mapping[Source, torch.Tensor] | None = None) -> Prepared:
    """The same capture, its last product and cross entropy a few rows at a time."""
    return prepare(model, args, dict(kwargs or {}), replace(prepared.settings, split_head="always"),
                   prepared.progress, wanted=prepared.partition.program.joint.wanted, costs=costs,
                   captured=prepared.capture, tensors=tensors)


def fitting(prepared: Prepared, search: Callable[[Prepared], Found],
            split: Callable[[], Prepared]) -> Found:
    """What `search` finds; where nothing fits, what it finds in `split()`, with a warning.

    Raises:
        InfeasibleBudget: nothing fits in either; it says the smaller of their smallest budgets.
    """
    try:
        return search(prepared)
    except InfeasibleBudget as error:
        if not prepared.can_split_heads:
            raise
        plain = error
    try:
        found = search(split())
    except InfeasibleBudget as error:
        raise min(plain, error, key=lambda e: e.minimum_bytes) from None
    names = ", ".join(prepared.partition.program.joint.heads)
    warnings.warn(
        f"nothing fits in this budget with the original's operations, so the product with {names} and "
        "its cross entropy are computed a few rows at a time. That weight's gradient is the original's "
        "but for the order of its additions: its last bits differ. "
        'rkmate.pipeline.Settings(split_head="never") refuses such budgets', RkmateWarning, stacklevel=4)
    return found
