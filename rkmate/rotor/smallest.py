"""The smallest memory in which a persistent sequence exists, to the byte.

The recurrence of Rockmate's appendix C.2 with the smallest sufficient memory in place of the
smallest time: no memory slots, O(L^2 (L + B)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rkmate.ir.chain import Chain, Floats, Ints
from rkmate.rotor.memory_requirements import MemoryRequirements

NEVER = np.int64(2**62)
"""More bytes than any chain needs (sums of two of them still fit an int64)."""


@dataclass(frozen=True)
class Smallest:
    """The smallest memory of every sub-problem."""

    bytes: Ints
    """``bytes[s, t]``: smallest memory for blocks s .. t-1, cut s not included."""
    seconds: Floats
    """Time of a sequence that needs no more than that (an upper bound of the least time)."""


def smallest(chain: Chain, needs: MemoryRequirements | None = None, *, keep: bool = True) -> Smallest:
    """Fill the table of smallest memories.

    `keep`: options may stay in memory while later blocks run; without it an option's backward
    follows its forward at once (automatic differentiation's model).
    """
    needs = needs or MemoryRequirements(chain)
    n = len(chain)
    memory = np.full((n + 1, n + 1), NEVER, dtype=np.int64)
    time = np.full((n + 1, n + 1), np.inf)
    for s in range(n - 1, -1, -1):
        options = needs.options[s]
        for k, cost in enumerate(options.seconds):
            need = needs.option_rows(s, k)
            if keep:
                need[1:] = np.maximum(need[1:], options.keep[k] + memory[s + 1, s + 2:])
                total = np.concatenate(([cost], cost + time[s + 1, s + 2:]))
            else:
                need[1:] = NEVER
                total = np.full(n - s, cost)
            _improve(memory[s, s + 1:], time[s, s + 1:], need, total)
        for i in range(s + 1, n):
            need = np.maximum(needs.split_rows(s, i), needs.between[s, i] + memory[i, i + 1:])
            need = np.maximum(need, memory[s, i])
            elapsed = needs.elapsed[i] - needs.elapsed[s]
            _improve(memory[s, i + 1:], time[s, i + 1:], need, time[i, i + 1:] + (elapsed + time[s, i]))
    return Smallest(memory, time)


def _improve(memory: Ints, time: Floats, need: Ints, total: Floats) -> None:
    """Take over, in place, what needs less memory, or as much for less time."""
    better = (need < memory) | ((need == memory) & (total < time))
    np.copyto(memory, need, where=better)
    np.copyto(time, total, where=better)
