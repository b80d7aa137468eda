"""Results for a block while its grid of budgets is solved: options found, bounds proven.

The optimal time falls as either budget grows. So a bound proven for one pair of budgets holds for
every tighter pair, and an option answers every pair that it fits into: most of the grid never
reaches the solver.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rkmate.ir.chain import Option


def peak(option: Option) -> int:
    """Return the greater of an option's two peaks, in bytes: what M_peak bounds."""
    return max(option.forward_peak_bytes, option.backward_peak_bytes)


def seconds(option: Option) -> float:
    """Time of forward and backward together."""
    return option.forward_seconds + option.backward_seconds


@dataclass
class ParetoFront:
    """Options found so far and lower bounds proven so far."""

    tolerance: float = 0.0
    """Seconds by which an answer may miss the optimum."""
    options: list[Option] = field(default_factory=list)
    proofs: list[tuple[int, int, float]] = field(default_factory=list)
    """(M_peak, M_save, seconds): no option within these budgets is faster; infinite when there is
    none at all."""

    def best(self, m_peak: int, m_save: int) -> Option | None:
        """Return the fastest known option within the budgets."""
        fitting = [o for o in self.options if o.saved_bytes <= m_save and peak(o) <= m_peak]
        return min(fitting, key=lambda o: (seconds(o), o.saved_bytes, peak(o)), default=None)

    def bound(self, m_peak: int, m_save: int) -> float:
        """Return seconds: the greatest lower bound known for these budgets."""
        return max((b for p, s, b in self.proofs if p >= m_peak and s >= m_save), default=-math.inf)

    def answered(self, m_peak: int, m_save: int) -> bool:
        """Return whether nothing is left to find for this pair, within the tolerance."""
        bound = self.bound(m_peak, m_save)
        if bound == math.inf:
            return True
        best = self.best(m_peak, m_save)
        return best is not None and seconds(best) <= bound + self.tolerance


def undominated(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the options that no other beats in time, saved bytes and both peaks; fastest first."""
    def key(o: Option) -> tuple[float, int, int, int]:
        return seconds(o), o.saved_bytes, o.backward_peak_bytes, o.forward_peak_bytes

    kept: list[Option] = []
    for option in sorted(options, key=key):
        mine = key(option)
        # Whatever dominates it comes before it, or is equal to it.
        if not any(all(a <= b for a, b in zip(key(other), mine, strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)
