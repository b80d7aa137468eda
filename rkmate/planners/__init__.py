"""Every method of the literature on the same graph, judged by the same simulator. No torch."""

from rkmate.planners.protocol import Outcome, Planner, Problem
from rkmate.planners.registry import PLANNERS, planner

__all__ = ["PLANNERS", "Outcome", "Planner", "Problem", "planner"]
