"""What a user may set about the integer program."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rkmate.errors import ArgumentError
from rkmate.support.defaults import Default


@dataclass(frozen=True)
class OptionSettings:
    """Settings of the option stage. They are part of the cache key: other settings, other entry."""

    grid: tuple[int, int] = (20, 20)
    """Number of thresholds for (M_peak, M_save). Rockmate, section 3.3 and figure 4."""
    time_limit: float = 2.0
    """Seconds for one integer program. When it is over, the best solution found counts."""
    block_limit: float = 10.0
    """Seconds of solving for one block's whole grid. What is left of the grid when it is over is
    answered by the solutions known by then, and counted as timed out."""
    total_limit: float = 30.0
    """Seconds of solving for all blocks of a model, on all cores: a block gets no more than its share of
    what is left when its turn comes."""
    gap: float = 1e-3
    """A solution counts as optimal when it is proven within this fraction of the block's own time
    (forward and backward, nothing recomputed)."""
    eager: bool = True
    """Let a stage recompute what only a later stage reads. The optimum is never worse, the program
    is somewhat larger."""

    def __post_init__(self) -> None:
        if len(self.grid) != 2 or any(not isinstance(n, int) or n < 1 for n in self.grid):
            raise ArgumentError(f"grid is {self.grid!r}; it should be two integers of at least 1")
        for name in ("time_limit", "block_limit", "total_limit", "gap"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} is {value!r}; it should be finite and not negative")


DEFAULT = Default(OptionSettings())
"""What holds where nobody sets anything."""
