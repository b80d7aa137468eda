"""Compare all planners on one model at equal budgets, in one table and one picture."""

from rkmate.comparison.run import compare
from rkmate.comparison.table import Comparison, Row

__all__ = ["Comparison", "Row", "compare"]
