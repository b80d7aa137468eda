"""rk-Rotor: the fastest persistent sequence of block operations for every memory budget at once.

Rockmate (ICML 2023), section 3.4 and appendix C.2, equations (1) to (3), in O(L^2 M (L + B)) for L
blocks, M memory slots and B options a block, with NumPy over slots and sub-problems.
"""

from __future__ import annotations

import numpy as np

from rkmate.errors import ArgumentError
from rkmate.ir.chain import Backward, Chain, Forward, Op
from rkmate.rotor.backtrack import Backtrack, Layer
from rkmate.rotor.fill_table import fill_table
from rkmate.rotor.memory_requirements import MemoryRequirements, Smallest, smallest
from rkmate.rotor.replay import Cost, replay

BUDGETS = 128
"""Budgets at which `Table.sequence` prepares a sequence in exact bytes; fewer for chains of more
than `LONG` blocks, in proportion to the square of their length, as each takes longer."""
LONG = 24
Least = tuple[MemoryRequirements, Smallest]
"""Memory needs of each choice of a chain, and the smallest memory of every sub-problem."""


class Table:
    """Least times of all sub-problems at every budget of 0 .. `slots` memory slots.

    Budgets are bytes and include the chain's first cut.
    """

    def __init__(self, chain: Chain, needs: MemoryRequirements, small: Smallest, slots: int, slot_bytes: int,
                 *, keep: bool = True) -> None:
        self.chain = chain
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.minimum_bytes = int(small.bytes[0, len(chain)]) + chain.input_bytes
        """Smallest budget for which there is a sequence."""
        self._top = fill_table(needs, small, slots, slot_bytes, keep=keep)
        self._keep = keep
        self._backtrack = Backtrack(self._top, slot_bytes, keep=keep)
        self._pool: list[tuple[Cost, list[Op]]] | None = None

    def seconds(self, budget_bytes: int) -> float:
        """Return the time that the table promises for a budget; `sequence` is at least as fast. Infinite: no
        sequence."""
        slot = min((budget_bytes - self.chain.input_bytes) // self.slot_bytes, self.slots)
        if slot < 0:
            return np.inf
        row, time = self._top.table
        return float(time[row[0] + len(self.chain), slot])

    def sequence(self, budget_bytes: int, *, prepared: bool = True) -> list[Op] | None:
        """Return the fastest sequence known within a budget; None below `minimum_bytes`.

        Never slower than `seconds` promises: what it returns is the best of a set of sequences, of
        which it takes those that fit, and of what the table promises. With that set for every slot
        (`slots` no more than `BUDGETS`) also never slower than at a smaller budget. Without it
        (`prepared`), as it takes a while to make, just what the table promises.
        """
        inside = [(cost, ops) for cost, ops in self.candidates()
                  if cost.peak_bytes <= budget_bytes] if prepared else []
        promised = self.promised(budget_bytes)
        if promised is not None:
            inside.append(promised)
        return min(inside, key=lambda pair: pair[0].seconds)[1] if inside else None

    def promised(self, budget_bytes: int) -> tuple[Cost, list[Op]] | None:
        """Return a sequence that is as fast as `seconds` promises; None where the table has none."""
        slot = min((budget_bytes - self.chain.input_bytes) // self.slot_bytes, self.slots)
        ops = self._backtrack.ops(slot * self.slot_bytes)
        return None if ops is None else (replay(self.chain, ops), ops)

    def candidates(self) -> list[tuple[Cost, list[Op]]]:
        """Return sequences for budgets between the smallest and the largest, with their costs."""
        if self._pool is None:
            low = self.minimum_bytes - self.chain.input_bytes
            fast = fastest(self.chain) if self._keep else None
            high = self.slots * self.slot_bytes
            if fast is not None:
                high = min(high, replay(self.chain, fast).peak_bytes - self.chain.input_bytes)
            pool = [] if fast is None else [fast]
            count = max(16, min(BUDGETS, BUDGETS * LONG**2 // len(self.chain)**2))
            budgets = {low + (high - low) * k // count for k in range(count)}
            if self.slots <= BUDGETS:
                # Carried in bytes, a sequence may be faster than promised: each counts at larger budgets.
                budgets.update(slot * self.slot_bytes for slot in range(self.slots + 1))
            for budget in sorted(budgets):
                ops = self._backtrack.ops(budget)
                if ops is not None and (not pool or ops != pool[-1]):
                    pool.append(ops)
            self._pool = [(replay(self.chain, ops), ops) for ops in pool]
        return self._pool


def least(chain: Chain, *, keep: bool = True) -> Least:
    """Return what both `minimum` and `solve` begin from. `keep`: as in `smallest`."""
    needs = MemoryRequirements(chain)
    return needs, smallest(chain, needs, keep=keep)


def minimum(chain: Chain, known: Least | None = None) -> tuple[int, list[Op]]:
    """Return the smallest memory, in bytes, that a persistent sequence needs, and a sequence within it.

    The first cut is included. The sequence spends what memory sub-problems have to spare, but is
    not necessarily the fastest one at this budget. `known`: what `least` says of this chain.
    """
    chain.verify()
    needs, small = known or least(chain)
    rebuilt = Backtrack(Layer(needs, small)).ops(int(small.bytes[0, len(chain)]))
    assert rebuilt is not None
    return int(small.bytes[0, len(chain)]) + chain.input_bytes, rebuilt


def fastest(chain: Chain) -> list[Op]:
    """Return the sequence that runs every block once, with its fastest option: the upper end of the
    trade-off."""
    best = [min(range(len(b.options)), key=lambda k: (
        b.options[k].forward_seconds + b.options[k].backward_seconds, b.options[k].saved_bytes))
        for b in chain.blocks]
    there: list[Op] = [Forward(s, k) for s, k in enumerate(best)]
    back: list[Op] = [Backward(s, k) for s, k in reversed(list(enumerate(best)))]
    return there + back


def solve(chain: Chain, slots: int = 500, slot_bytes: int | None = None, *,
          most: int | None = None, keep: bool = True, known: Least | None = None) -> Table:
    """Solve the chain for all budgets at once.

    `slots`: into how many slots the memory of the fastest sequence is divided, when `slot_bytes`
    does not say how large one is. Sizes are rounded up to slots and budgets down, so what fits in
    slots fits in bytes. `most`: bytes above which more memory is not made use of; the slots of small
    budgets are finer then. `keep`: as in `smallest`. `known`: what `least` says of this chain, where
    `keep` is.
    """
    chain.verify()
    if slots < 1 or (slot_bytes is not None and slot_bytes < 1):
        raise ArgumentError(f"slots and slot_bytes must be at least 1, got {slots}, {slot_bytes}")
    needs, small = known if known is not None and keep else least(chain, keep=keep)
    low = int(small.bytes[0, len(chain)])
    if keep:
        top = max(low, replay(chain, fastest(chain)).peak_bytes - chain.input_bytes)
    else:
        top = max(low, _top_without_keeping(chain, needs))
    if most is not None and most - chain.input_bytes < top:
        top = max(low, most - chain.input_bytes)
        size = slot_bytes or max(1, -(-top // slots))
        used = -(-top // size)
    elif slot_bytes is not None:
        size, used = slot_bytes, _slots_needed(chain, needs, slot_bytes, top, keep=keep)
    else:
        # Rounded up one by one, sizes may add up to more than `slots`: make slots a little larger.
        size = max(1, -(-top // slots))
        for _ in range(6):
            used = _slots_needed(chain, needs, size, top, keep=keep)
            if used <= slots:
                break
            size = -(-size * used // slots)
    return Table(chain, needs, small, max(used, -(-low // size), 1), size, keep=keep)


def _top_without_keeping(chain: Chain, needs: MemoryRequirements) -> int:
    """Return memory that allows every cut to be kept while any block runs."""
    own = max(int(needs.option(s, t).max()) for s in range(len(chain)) for t in (s + 1, len(chain)))
    return own + sum(int(chain.between[s, s + 1]) for s in range(len(chain)))


def _slots_needed(chain: Chain, needs: MemoryRequirements, size: int, top: int, *, keep: bool) -> int:
    """Return the number of slots above which nothing is gained, each size rounded up to slots of `size`
    bytes."""
    if not keep:
        return -(-top // size) + len(chain)
    used = result = 0
    n = len(chain)
    for op in fastest(chain)[:n]:
        s, k = op.block, op.option  # type: ignore[union-attr]
        need = int(needs.option(s, n)[k])
        result = max(result, used + -(-need // size))
        used += -(-int(needs.options[s].keep[k]) // size)
    return result
