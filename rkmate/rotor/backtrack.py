"""Turn tables back into a sequence of operations, with budgets carried in exact bytes.

Rockmate, appendix C, algorithm 3, with two differences. It is a loop, not a recursion: chains have
hundreds of blocks. And the budget of a sub-problem is a number of bytes: only the look-up of what a
sub-problem costs rounds (down) to slots, so the losses of rounding do not add up along the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rkmate.ir.chain import Backward, Floats, Forward, ForwardPlain, ForwardSaving, Ints, Op
from rkmate.rotor.memory_requirements import MemoryRequirements, Smallest
from rkmate.rotor.partial_saves import PartialSaves


@dataclass(frozen=True)
class Layer:
    """Data about all sub-problems: of the chain itself, or of the chain with its partial saves of one index
    in memory."""

    needs: MemoryRequirements
    small: Smallest
    table: tuple[Ints, Floats] = (np.zeros(0, dtype=np.int64), np.zeros((0, 0)))
    """``row`` and ``time``: ``time[row[s] + t, slot]``, least seconds in a table of slots; or empty."""
    saves: PartialSaves | None = None

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

    def __init__(self, layers: Sequence[Layer], slot_bytes: int = 1, *, keep: bool = True) -> None:
        self.layers = layers
        self.slot_bytes = slot_bytes
        self.keep = keep

    def ops(self, budget: int) -> list[Op] | None:
        """Return a sequence that needs at most `budget` bytes (first cut not included), or None."""
        n = self.layers[0].needs.blocks
        if budget < self.layers[0].small.bytes[0, n]:
            return None
        result: list[Op] = []
        todo: list[Op | tuple[int, Layer, int, int]] = [(0, self.layers[0], n, budget)]
        while todo:
            item = todo.pop()
            if isinstance(item, Backward | Forward | ForwardPlain | ForwardSaving):
                result.append(item)
                continue
            s, layer, t, m = item
            needs, index = layer.needs, None if layer.saves is None else layer.saves.index
            best, seconds = self._option(layer, s, t, m)
            split, below = None, layer
            known = float(layer.cost(s, t, np.array(m), self.slot_bytes))
            for other in (layer,) if index is not None else self.layers:
                if other is not layer and seconds <= known * (1 + 1e-9):
                    break           # the third case has nothing to offer
                i, total = self._split(layer, other, s, t, m)
                if total < seconds:
                    split, below, seconds = i, other, total
            if split is None:
                assert seconds < np.inf
                result.append(Forward(s, best, index))
                todo.append(Backward(s, best, index))
                if t > s + 1:
                    todo.append((s + 1, layer, t, m - int(needs.options[s].keep[best])))
            else:
                if below is layer:
                    result.extend(ForwardPlain(j, index) for j in range(s, split))
                else:
                    assert below.saves is not None
                    result.extend(ForwardSaving(j, below.saves.index) for j in range(s, split))
                todo.append((s, below, split, m))
                todo.append((split, layer, t, m - int(below.needs.between[s, split])))
        return result

    def _option(self, layer: Layer, s: int, t: int, m: int) -> tuple[int, float]:
        """Return the first case: the best option of block s, and the seconds of (s, t) with it."""
        needs = layer.needs
        options = needs.options[s]
        if t == s + 1:
            rest: Floats | float = 0.0
        elif self.keep:
            rest = layer.cost(s + 1, t, m - options.keep, self.slot_bytes)
        else:
            rest = np.inf
        direct = np.where(needs.option(s, t) <= m, options.seconds + rest, np.inf)
        best = int(np.argmin(direct))
        return best, float(direct[best])

    def _split(self, layer: Layer, below: Layer, s: int, t: int, m: int) -> tuple[int, float]:
        """Return the second case, or (where `below` is another layer) the third: the best cut, the
        seconds."""
        end = t - 1
        if below is not layer:
            assert below.saves is not None
            need = below.saves.first(s, t)
            end = s + len(need)
        if end <= s:
            return t, np.inf
        if below is layer:
            need = layer.needs.split(s, t)
        i = np.arange(s + 1, end + 1)
        elapsed = layer.needs.elapsed
        after = m - below.needs.between[s, s + 1:end + 1]
        total = (elapsed[s + 1:end + 1] - elapsed[s] + layer.cost(i, t, after, self.slot_bytes)
                 + below.cost(s, i, np.full(end - s, m), self.slot_bytes))
        total[need > m] = np.inf
        at = int(np.argmin(total))
        return s + 1 + at, float(total[at])
