"""Every planner on one model at equal budgets: one table, one picture."""

from rkmate.comparison.run import compare
from rkmate.comparison.table import Comparison, Row

__all__ = ["Comparison", "Row", "compare"]
