"""Every planner on one model at equal budgets: one table, one picture."""

from rkmate.compare.comparing import compare
from rkmate.compare.comparison import Comparison, Row

__all__ = ["Comparison", "Row", "compare"]
