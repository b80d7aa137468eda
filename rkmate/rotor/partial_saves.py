"""Partial saves: sub-problems whose blocks have something in memory that makes their forwards cheaper.

Rockmate, section 3.4, leaves open that "it might be beneficial to save some intermediate tensor on the first
pass, and use it to compute the output faster on subsequent passes". Each block has as many
`rkmate.ir.chain.PartialSave` as the others; those of one index go together. In addition to the paper's two
cases, a sub-problem (s, t) has a third: forwards of s .. i-1 that make the saves of one index, then (i, t),
then (s, i) with these saves in memory, where blocks need no forward from scratch any more. What is saved of a
block stays until its backward, and belongs to the memory of that (s, i).
"""

from __future__ import annotations

import numpy as np

from rkmate.ir.chain import Chain, Ints
from rkmate.rotor.memory_requirements import MemoryRequirements, Smallest, smallest

SPAN = 8
"""Most blocks that keep something for one another: more have been of no use (5 at most were used on
ResNets), and their tables grow with it."""


class PartialSaves:
    """The partial saves of one index: what their sub-problems need, and the forwards that begin them."""

    def __init__(self, chain: Chain, index: int, base: MemoryRequirements) -> None:
        n = len(chain)
        given = chain.with_partial_saves(index)
        kept = [b.partial_saves[index] for b in chain.blocks]
        self.index = index
        self.needs = MemoryRequirements(given, np.array([k.bytes for k in kept], dtype=np.int64))
        self.small: Smallest = smallest(given, self.needs, span=SPAN)
        self._base = base
        peaks = np.array([k.first_peak_bytes for k in kept], dtype=np.int64)
        during = self.needs.between[:n, :n] + peaks
        lower = np.tril(np.ones((n, n), dtype=bool), -1)
        self._run = np.maximum.accumulate(np.where(lower, 0, during), axis=1)
        self._run_first = np.maximum.accumulate(np.where(lower, 0, during + base.first), axis=1)

    def first(self, s: int, t: int) -> Ints:
        """Return bytes during the saving forwards to each cut i in s+1 .. min(t-1, s+SPAN) of (s, t)."""
        end = min(t - 1, s + SPAN)
        if t == self._base.blocks:
            need: Ints = self._run_first[s, s:end]
        else:
            need = self._run[s, s:end] + self._base.base[t]
        return need

    def first_rows(self, s: int, i: int) -> Ints:
        """Return bytes during the saving forwards from cut s to cut i for every t in i+1 .. L."""
        need: Ints = self._run[s, i - 1] + self._base.base[i + 1:]
        need[-1] = self._run_first[s, i - 1]
        return need


def partial_saves_of(chain: Chain, base: MemoryRequirements) -> tuple[PartialSaves, ...]:
    """Return the partial saves of every index. `base`: the requirements of the chain itself."""
    return tuple(PartialSaves(chain, k, base) for k in range(len(chain.blocks[0].partial_saves)))
