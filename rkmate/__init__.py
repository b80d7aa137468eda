"""rkmate: train any PyTorch model inside a memory budget."""

import importlib
import typing

from rkmate.compare import Comparison, compare
from rkmate.device_memory import BatchSize, auto_budget, max_batch_size
from rkmate.errors import (
    ArgumentError,
    BackwardError,
    CaptureError,
    GraphError,
    InfeasibleBudget,
    MissingExtra,
    PlanError,
    PlanningTimeout,
    RkmateError,
    RkmateWarning,
    ScheduleError,
    SolverError,
)
from rkmate.measure.step import measure_step
from rkmate.module import PlannedModule
from rkmate.plan import Plan
from rkmate.shared_plan import shared_plan
from rkmate.show.curve import Curve
from rkmate.wrap import plan, tradeoff, wrap

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackwardError",
    "BatchSize",
    "CaptureError",
    "Comparison",
    "Curve",
    "GraphError",
    "InfeasibleBudget",
    "MissingExtra",
    "Plan",
    "PlanError",
    "PlannedModule",
    "PlanningTimeout",
    "RkmateError",
    "RkmateWarning",
    "ScheduleError",
    "SolverError",
    "auto_budget",
    "compare",
    "max_batch_size",
    "measure_step",
    "plan",
    "shared_plan",
    "tradeoff",
    "wrap",
]


def __getattr__(name: str) -> typing.Any:
    # Most programs have a plan: the dynamic runtime is loaded when it is first named.
    if name == "dtr":
        return importlib.import_module("rkmate.dtr")
    raise AttributeError(f"module 'rkmate' has no attribute {name!r}")
