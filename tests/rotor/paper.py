"""Rotor in the notation of its paper (Beaumont et al. 2019, RR-9302): the optimal persistent sequence of a
heterogeneous chain. Theorem 1 and algorithms 1 and 2 are the case of one option a block of
`rkmate.rotor.rk_rotor`.

Two things in print do not agree with the paper's own table 1, which is what is followed here. The
theorem lost its overlines: ``m_all = max(wd[t] + wab[s] + of[s], wd[s] + wab[s] + wd[s-1] + ob[s])``
and C_all subtracts ``wab[s]``. And algorithm 2's plain forwards stop at stage s'-1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rkmate.errors import GraphError
from rkmate.ir.chain import Block, Chain, Option
from rkmate.rotor.rk_rotor import Table, solve


@dataclass(frozen=True)
class RotorChain:
    """A chain in the paper's notation: stages 1 .. L+1, the last one is the loss.

    Lists are indexed by the paper's superscripts, so index 0 of `uf`, `ub`, `wab`, `of` and `ob` is
    not used. Sizes are whole numbers (bytes or slots), times are seconds.
    """

    uf: Sequence[float]
    """Time of each forward."""
    ub: Sequence[float]
    """Time of each backward."""
    wa: Sequence[int]
    """Size of each activation a^l."""
    wab: Sequence[int]
    """Size of all that F_all keeps of stage l, a^l included."""
    wd: Sequence[int]
    """Size of the gradient of a^l."""
    of: Sequence[int]
    """Memory overhead of each forward."""
    ob: Sequence[int]
    """Memory overhead of each backward."""

    def chain(self) -> Chain:
        """Return a `Chain` of L+1 blocks. Raises `GraphError` if lists do not fit."""
        n = len(self.wa)
        lists = (self.uf, self.ub, self.wab, self.wd, self.of, self.ob)
        if n < 2 or any(len(values) != n for values in lists):
            raise GraphError("a Rotor chain needs seven lists of the same length, at least 2")
        if any(self.wab[k] < self.wa[k] for k in range(1, n)):
            raise GraphError("F_all keeps the stage's output too: wab is at least wa")
        blocks = tuple(
            Block(self.uf[k], self.wa[k] + self.of[k],
                  (Option((), (), self.uf[k], self.ub[k], self.wab[k] - self.wa[k],
                          self.wab[k] + self.of[k],
                          self.wd[k] + self.wab[k] + self.wd[k - 1] + self.ob[k]),))
            for k in range(1, n))
        # Theorem 1 has the gradient of the loss in memory from the start.
        return Chain(blocks, tuple(frozenset({k}) for k in range(n)), dict(enumerate(self.wa)),
                     tuple(self.wd), grads_at_start=self.wd[-1]).verify()


def rotor(chain: RotorChain, slots: int = 500, slot_bytes: int | None = None) -> Table:
    """Solve a chain for every budget. Budgets include a^0, so C_BP(1, L+1, M - wa[0]) answers M."""
    return solve(chain.chain(), slots, slot_bytes)


def large_chain(stages: int) -> RotorChain:
    """Return a chain whose stages all differ: times in milliseconds, sizes of up to megabytes."""
    draw = random.Random(1)
    wa = [draw.randint(1 << 18, 1 << 22) for _ in range(stages + 1)]
    wab = [a + draw.randint(0, 1 << 23) for a in wa]
    return RotorChain([draw.uniform(0.5, 4) for _ in wa], [draw.uniform(1, 8) for _ in wa], wa, wab,
                      wa, [draw.randint(0, 1 << 20) for _ in wa], [0] * (stages + 1))
