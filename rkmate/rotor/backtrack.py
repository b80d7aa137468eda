"""Turn tables back into a sequence of operations, with budgets carried in exact bytes.

Rockmate, appendix C, algorithm 3, with two differences. It is a loop, not a recursion: chains have
hundreds of blocks. And the budget of a sub-problem is a number of bytes: only the look-up of what a
sub-problem costs rounds (down) to slots, so the losses of rounding do not add up along the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rkmate.ir.chain import Backward, Floats, Forward, ForwardPlain, Ints, Op
from rkmate.rotor.memory_requirements import MemoryRequirements, Smallest


@dataclass(frozen=True)
class Layer:
    """Data about all sub-problems of a chain."""

    needs: MemoryRequirements
    small: Smallest
    table: tuple[Ints, Floats] = (np.zeros(0, dtype=np.int64), np.zeros((0, 0)))
    """``row`` and ``time``: ``time[row[s] + t, slot]``, least seconds in a table of slots; or empty."""

    def cost(self, s: Ints | int, t: Ints | int, memory: Ints, slot_bytes: int) -> Floats:
        """Return upper bounds of the time of sub-problems (s, t) with some bytes each."""
        feasible = memory >= self.small.bytes[s, t]
        result: Floats = np.where(feasible, self.small.seconds[s, t], np.inf)
        row, time = self.table
        if len(time):
            slot = np.minimum(np.maximum(memory // slot_bytes, 0), time.shape[1] - 1)
            found = time[row[s] + t, slot]
            result = np.minimum(result, np.where(memory >= 0, found, np.inf))
        return result


class Backtrack:
    """Builds sequences for any budget from the smallest memories, and tables of slots (if any)."""

    def __init__(self, layer: Layer, slot_bytes: int = 1, *, keep: bool = True) -> None:
        self.layer = layer
        self.slot_bytes = slot_bytes
        self.keep = keep

    def ops(self, budget: int) -> list[Op] | None:
        """Return a sequence that needs at most `budget` bytes (first cut not included), or None."""
        needs, n = self.layer.needs, self.layer.needs.blocks
        if budget < self.layer.small.bytes[0, n]:
            return None
        result: list[Op] = []
        todo: list[Op | tuple[int, int, int]] = [(0, n, budget)]
        while todo:
            item = todo.pop()
            if isinstance(item, Backward | Forward | ForwardPlain):
                result.append(item)
                continue
            s, t, m = item
            best, seconds = self._option(s, t, m)
            split, total = self._split(s, t, m)
            if total < seconds:
                result.extend(ForwardPlain(j) for j in range(s, split))
                todo.append((s, split, m))
                todo.append((split, t, m - int(needs.between[s, split])))
            else:
                assert seconds < np.inf
                result.append(Forward(s, best))
                todo.append(Backward(s, best))
                if t > s + 1:
                    todo.append((s + 1, t, m - int(needs.options[s].keep[best])))
        return result

    def _option(self, s: int, t: int, m: int) -> tuple[int, float]:
        """Return the first case: the best option of block s, and the seconds of (s, t) with it."""
        needs = self.layer.needs
        options = needs.options[s]
        if t == s + 1:
            rest: Floats | float = 0.0
        elif self.keep:
            rest = self.layer.cost(s + 1, t, m - options.keep, self.slot_bytes)
        else:
            rest = np.inf
        direct = np.where(needs.option(s, t) <= m, options.seconds + rest, np.inf)
        best = int(np.argmin(direct))
        return best, float(direct[best])

    def _split(self, s: int, t: int, m: int) -> tuple[int, float]:
        """Return the second case: the best cut, and the seconds of (s, t) with it."""
        if t == s + 1:
            return t, np.inf
        layer, needs = self.layer, self.layer.needs
        i = np.arange(s + 1, t)
        after = m - needs.between[s, s + 1:t]
        total = (needs.elapsed[s + 1:t] - needs.elapsed[s] + layer.cost(i, t, after, self.slot_bytes)
                 + layer.cost(s, i, np.full(t - 1 - s, m), self.slot_bytes))
        total[needs.split(s, t) > m] = np.inf
        at = int(np.argmin(total))
        return s + 1 + at, float(total[at])
