"""From tables back to a sequence of operations, with budgets carried in exact bytes.

Rockmate, appendix C, algorithm 3, with two differences. It is a loop, not a recursion: chains have
hundreds of blocks. And the budget of a sub-problem is a number of bytes: only the look-up of what a
sub-problem costs rounds (down) to slots, so the losses of rounding do not add up along the chain.
"""

from __future__ import annotations

import numpy as np

from rkmate.rotor.chain import Backward, Chain, Floats, Forward, ForwardPlain, Ints, Op
from rkmate.rotor.needs import Needs
from rkmate.rotor.smallest import Smallest


class Rebuild:
    """Builds sequences for any budget from a table of slots (if any) and the smallest memories."""

    def __init__(self, chain: Chain, needs: Needs, small: Smallest, table: Floats | None = None,
                 row: Ints | None = None, slot_bytes: int = 1, *, keep: bool = True) -> None:
        self.chain = chain
        self.needs = needs
        self.small = small
        self.table = table
        self.row = row
        self.slot_bytes = slot_bytes
        self.keep = keep

    def _cost(self, s: Ints | int, t: Ints | int, memory: Ints) -> Floats:
        """Upper bounds of the time of sub-problems (s, t) with some bytes each."""
        feasible = memory >= self.small.bytes[s, t]
        result: Floats = np.where(feasible, self.small.seconds[s, t], np.inf)
        if self.table is not None and self.row is not None:
            slot = np.clip(memory // self.slot_bytes, 0, self.table.shape[1] - 1)
            found = self.table[self.row[s] + t, slot]
            result = np.minimum(result, np.where(memory >= 0, found, np.inf))
        return result

    def ops(self, budget: int) -> list[Op] | None:
        """A sequence that needs at most `budget` bytes (first cut not included), or None."""
        needs, n = self.needs, len(self.chain)
        if budget < self.small.bytes[0, n]:
            return None
        result: list[Op] = []
        todo: list[Op | tuple[int, int, int]] = [(0, n, budget)]
        while todo:
            item = todo.pop()
            if isinstance(item, Backward | Forward | ForwardPlain):
                result.append(item)
                continue
            s, t, m = item
            options = needs.options[s]
            left = m - options.keep
            if t == s + 1:
                rest: Floats | float = 0.0
            elif self.keep:
                rest = self._cost(s + 1, t, left)
            else:
                rest = np.inf
            direct = np.where(needs.option(s, t) <= m, options.seconds + rest, np.inf)
            best = int(np.argmin(direct))
            split = None
            if t > s + 1:
                i = np.arange(s + 1, t)
                after = m - needs.between[s, s + 1:t]
                total = (needs.elapsed[s + 1:t] - needs.elapsed[s] + self._cost(i, t, after)
                         + self._cost(s, i, np.full(t - s - 1, m)))
                total[needs.split(s, t) > m] = np.inf
                at = int(np.argmin(total))
                if total[at] < direct[best]:
                    split = s + 1 + at
            if split is not None:
                result.extend(ForwardPlain(j) for j in range(s, split))
                todo.append((s, split, m))
                todo.append((split, t, m - int(needs.between[s, split])))
            else:
                assert direct[best] < np.inf
                result.append(Forward(s, best))
                todo.append(Backward(s, best))
                if t > s + 1:
                    todo.append((s + 1, t, int(left[best])))
        return result
