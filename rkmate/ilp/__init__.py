"""Options of a block: the integer program (rk-Checkmate) over a grid of memory budgets.

Rockmate (ICML 2023), section 3.3 and appendix B.
"""

from rkmate.ilp.cache import OptionCache
from rkmate.ilp.grid import BlockSolution, OptionSet, block_options, solve_block
from rkmate.ilp.highs import Status
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.solve_all import solve_options

__all__ = [
    "BlockSolution",
    "OptionCache",
    "OptionSet",
    "OptionSettings",
    "Status",
    "block_options",
    "solve_block",
    "solve_options",
]
