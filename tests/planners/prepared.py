"""Small models as problems: prepared once, planned many times."""

from __future__ import annotations

from typing import Any

from torch import nn

from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.prepare import prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.solve import Solved, solve
from rkmate.support.progress import Progress

QUICK = Settings(costs="analytic", options=OptionSettings(grid=(3, 3), time_limit=0.2, block_limit=1.0))
"""A small grid: the options of the blocks are not what is tested."""


def solved_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
              how: Settings = QUICK) -> Solved:
    """A model with the options of its blocks."""
    return solve(prepare(trace(model, args, kwargs or {}, how, Progress(False))))
