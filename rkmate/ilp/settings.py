"""Settings of the integer program."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rkmate.errors import ArgumentError
from rkmate.support.defaults import Default


@dataclass(frozen=True)
class OptionSettings:
    """Limits of the integer programs that find the options of blocks. These settings are part of the
    cache key."""

    grid: tuple[int, int] = (20, 20)
    """Number of thresholds for (M_peak, M_save). Rockmate, section 3.3 and figure 4."""
    time_limit: float = 2.0
    """Seconds for one integer program. After that, the best solution found is used."""
    block_limit: float = 10.0
    """Seconds of solving for one block's whole grid. After that, the solutions found so far answer the rest
    of the grid, which counts as timed out."""
    block_iterations: int = 4_000
    """Iterations of the simplex method for one block's whole grid, about a third of a second. After that, as
    after `block_limit`; which solutions are found does not depend on the machine, as it does with a clock."""
    total_limit: float = 30.0
    """Seconds of solving for all blocks of a model, on all cores. Each block gets at most its share of the
    time that is left when its turn comes."""
    gap: float = 1e-3
    """Fraction of the block's own time (forward and backward, nothing recomputed) within which a solution
    counts as optimal, if that is proven."""

    def __post_init__(self) -> None:
        if len(self.grid) != 2 or any(not isinstance(n, int) or n < 1 for n in self.grid):
            raise ArgumentError(f"grid is {self.grid!r}; it should be two integers of at least 1")
        for name in ("time_limit", "block_limit", "block_iterations", "total_limit", "gap"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} is {value!r}; it should be finite and not negative")


DEFAULT = Default(OptionSettings())
"""Settings that hold unless a user sets others."""
