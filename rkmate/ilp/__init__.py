"""Options of a block: the integer program (rk-Checkmate) over a grid of memory budgets.

Rockmate (ICML 2023), section 3.3 and appendix B.
"""

from rkmate.ilp.grid import OptionSet, Solution, block_options, solve_block
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.solver import Status

__all__ = ["OptionSet", "OptionSettings", "Solution", "Status", "block_options", "solve_block"]
