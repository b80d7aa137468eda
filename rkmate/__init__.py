"""rkmate: train any PyTorch model inside a memory budget."""

from rkmate.errors import (
    ArgumentError,
    BackwardError,
    CaptureError,
    GraphError,
    InfeasibleBudget,
    PlanError,
    PlanningTimeout,
    RkmateError,
    RkmateWarning,
    ScheduleError,
    SolverError,
)
from rkmate.module import PlannedModule
from rkmate.plan import Plan
from rkmate.wrap import plan, tradeoff, wrap

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackwardError",
    "CaptureError",
    "GraphError",
    "InfeasibleBudget",
    "Plan",
    "PlanError",
    "PlannedModule",
    "PlanningTimeout",
    "RkmateError",
    "RkmateWarning",
    "ScheduleError",
    "SolverError",
    "plan",
    "tradeoff",
    "wrap",
]
