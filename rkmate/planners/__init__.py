"""All planning methods of the literature on one graph, judged by one simulator. No torch."""

from rkmate.planners.protocol import Outcome, Planner, Problem
from rkmate.planners.registry import PLANNERS, planner

__all__ = ["PLANNERS", "Outcome", "Planner", "Problem", "planner"]
