"""rk-Rotor: the fastest persistent sequence of block operations for every memory budget at once.

Rockmate (ICML 2023), section 3.4 and appendix C.2, equations (1) to (3), in O(L^2 M (L + B)) for L
blocks, M memory slots and B options a block, with NumPy over slots and sub-problems.
"""

from __future__ import annotations

import numpy as np

from rkmate.errors import ArgumentError
from rkmate.rotor.chain import Backward, Chain, Floats, Forward, Ints, Op
from rkmate.rotor.needs import Needs
from rkmate.rotor.rebuild import Rebuild
from rkmate.rotor.replay import Cost, replay
from rkmate.rotor.smallest import Smallest, smallest

LEVELS = 128
"""Budgets at which `Table.sequence` prepares a sequence in exact bytes; fewer for chains of more
than 160 blocks, where each takes tens of milliseconds."""
ROWS = 96
"""Sub-problems updated at once: their columns stay in the processor's cache."""


class Table:
    """Least times of all sub-problems at every budget of 0 .. `slots` memory slots.

    Budgets are bytes and include the chain's first cut.
    """

    def __init__(self, chain: Chain, needs: Needs, small: Smallest, slots: int, slot_bytes: int,
                 *, keep: bool = True) -> None:
        self.chain = chain
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.minimum_bytes = int(small.bytes[0, len(chain)]) + chain.input_bytes
        """Smallest budget for which there is a sequence."""
        self._row, self._time = _fill(chain, needs, slots, slot_bytes, keep=keep)
        self._needs = needs
        self._keep = keep
        self._rebuild = Rebuild(chain, needs, small, self._time, self._row, slot_bytes, keep=keep)
        self._small = small
        self._pool: list[tuple[Cost, list[Op]]] | None = None

    def seconds(self, budget_bytes: int) -> float:
        """What the table promises for a budget: `sequence` is at least as fast. inf: nothing."""
        slot = min((budget_bytes - self.chain.input_bytes) // self.slot_bytes, self.slots)
        if slot < 0:
            return np.inf
        return float(self._time[self._row[0] + len(self.chain), slot])

    def sequence(self, budget_bytes: int) -> list[Op] | None:
        """The fastest sequence known within a budget; None below `minimum_bytes`.

        Never slower than `seconds` promises, and never slower than at a smaller budget: what it
        returns is the best of a fixed set of sequences, of which it takes those that fit.
        """
        inside = [(cost, ops) for cost, ops in self.candidates()
                  if cost.peak_bytes <= budget_bytes]
        promised = self.promised(budget_bytes)
        if promised is not None:
            inside.append(promised)
        return min(inside, key=lambda pair: pair[0].seconds)[1] if inside else None

    def promised(self, budget_bytes: int) -> tuple[Cost, list[Op]] | None:
        """A sequence that is as fast as `seconds` promises; None where the table has none."""
        slot = min((budget_bytes - self.chain.input_bytes) // self.slot_bytes, self.slots)
        ops = self._rebuild.ops(slot * self.slot_bytes)
        return None if ops is None else (replay(self.chain, ops), ops)

    def candidates(self) -> list[tuple[Cost, list[Op]]]:
        """Sequences for budgets between the smallest and the largest, with their costs."""
        if self._pool is None:
            low = self.minimum_bytes - self.chain.input_bytes
            fast = fastest(self.chain) if self._keep else None
            high = self.slots * self.slot_bytes
            if fast is not None:
                high = min(high, replay(self.chain, fast).peak_bytes - self.chain.input_bytes)
            pool = [] if fast is None else [fast]
            levels = max(32, min(LEVELS, 160 * LEVELS // len(self.chain)))
            for k in range(levels):
                ops = self._rebuild.ops(low + (high - low) * k // levels)
                if ops is not None and (not pool or ops != pool[-1]):
                    pool.append(ops)
            self._pool = [(replay(self.chain, ops), ops) for ops in pool]
        return self._pool


def minimum(chain: Chain) -> tuple[int, list[Op]]:
    """The smallest memory, in bytes, that a persistent sequence needs, and a sequence within it.

    The first cut is included. The sequence spends what memory sub-problems have to spare, but is
    not necessarily the fastest one at this budget.
    """
    chain.verify()
    needs = Needs(chain)
    small = smallest(chain, needs)
    rebuilt = Rebuild(chain, needs, small).ops(int(small.bytes[0, len(chain)]))
    assert rebuilt is not None
    return int(small.bytes[0, len(chain)]) + chain.input_bytes, rebuilt


def fastest(chain: Chain) -> list[Op]:
    """Every block once, with its fastest option: the upper end of the trade."""
    best = [min(range(len(b.options)), key=lambda k: (
        b.options[k].forward_seconds + b.options[k].backward_seconds, b.options[k].saved_bytes))
        for b in chain.blocks]
    there: list[Op] = [Forward(s, k) for s, k in enumerate(best)]
    back: list[Op] = [Backward(s, k) for s, k in reversed(list(enumerate(best)))]
    return there + back


def solve(chain: Chain, slots: int = 500, slot_bytes: int | None = None, *,
          most: int | None = None, keep: bool = True) -> Table:
    """Solve the chain for all budgets at once.

    `slots`: into how many slots the memory of the fastest sequence is divided, when `slot_bytes`
    does not say how large one is. Sizes are rounded up to slots and budgets down, so what fits in
    slots fits in bytes. `most`: bytes above which more memory is not made use of; the slots of small
    budgets are finer then. `keep`: as in `rkmate.rotor.smallest.smallest`.
    """
    chain.verify()
    if slots < 1 or (slot_bytes is not None and slot_bytes < 1):
        raise ArgumentError(f"slots and slot_bytes must be at least 1, got {slots}, {slot_bytes}")
    needs = Needs(chain)
    small = smallest(chain, needs, keep=keep)
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


def _top_without_keeping(chain: Chain, needs: Needs) -> int:
    """Memory that allows every cut to be kept while any block runs."""
    own = max(int(needs.option(s, t).max()) for s in range(len(chain)) for t in (s + 1, len(chain)))
    return own + sum(int(chain.between[s, s + 1]) for s in range(len(chain)))


def _slots_needed(chain: Chain, needs: Needs, size: int, top: int, *, keep: bool) -> int:
    """Slots above which nothing is gained, each size rounded up to slots of `size` bytes."""
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


def _fill(chain: Chain, needs: Needs, slots: int, size: int, *,
          keep: bool) -> tuple[Ints, Floats]:
    """The table: ``time[row[s] + t, m]`` is Opt(s, t, m) of appendix C.2."""
    n = len(chain)
    # Rows t = s+1 .. L of one s stand together, so that shifting by memory is a slice.
    row = np.array([s * n - s * (s - 1) // 2 - (s + 1) for s in range(n)] + [0], dtype=np.int64)
    time = np.full((n * (n + 1) // 2, slots + 1), np.inf)
    first = np.full(len(time), slots + 1, dtype=np.int64)    # first finite column of each row
    ideal = np.concatenate(([0.0], np.cumsum([o.seconds.min() for o in needs.options])))
    scratch = np.empty((ROWS, slots + 1))
    for s in range(n - 1, -1, -1):
        start = int(row[s]) + s + 1
        mine = time[start:start + n - s]
        options = needs.options[s]
        end = np.full(n - s, slots + 1, dtype=np.int64)
        for k, cost in enumerate(options.seconds):
            need = -(-needs.option_rows(s, k) // size)
            if need[0] <= slots:
                np.minimum(mine[0, need[0]:], cost, out=mine[0, need[0]:])
            if keep and s + 1 < n:
                below = int(row[s + 1]) + s + 2
                _relax(mine[1:], time[below:below + n - s - 1], first[below:below + n - s - 1],
                       -(-int(options.keep[k]) // size), need[1:], cost, 0, end[1:], scratch)
        # A split at i recomputes the forwards before i at least: where an option already adds less,
        # it has nothing to offer.
        adds = (needs.elapsed[s + 1:n] - needs.elapsed[s]) * (1 - 1e-12)
        ends = np.empty((n - s, n - s - 1), dtype=np.int64)
        for r in range(n - s):
            best = ideal[s + 1 + r] - ideal[s]
            ends[r] = slots + 1 - np.searchsorted(mine[r, ::-1], best + adds, side="right")
        for i in range(s + 1, n):
            here = int(row[s]) + i
            first[here] = _first(time[here], slots)
            below = int(row[i]) + i + 1
            alone = time[here] + (needs.elapsed[i] - needs.elapsed[s])
            _relax(mine[i - s:], time[below:below + n - i], first[below:below + n - i],
                   -(-int(needs.between[s, i]) // size), -(-needs.split_rows(s, i) // size),
                   alone, int(first[here]), ends[i - s:, i - s - 1], scratch)
        first[int(row[s]) + n] = _first(time[int(row[s]) + n], slots)
    return row, time


def _first(line: Floats, slots: int) -> int:
    return slots + 1 - int(np.isfinite(line).sum())     # finite from some column on


def _relax(into: Floats, rest: Floats, first: Ints, shift: int, need: Ints,
           extra: Floats | float, start: int, end: Ints, scratch: Floats) -> None:
    """``into[r, m] = min(into[r, m], rest[r, m - shift] + extra[m])`` where need[r] <= m < end[r].

    `first`: first finite column of each row of `rest`; `start`: of `extra`.
    """
    for low in range(0, len(rest), ROWS):
        rows = slice(low, low + ROWS)
        begin = max(start, shift + int(first[rows].min()))
        stop = int(end[rows].max())
        if begin >= stop:
            continue
        part = rest[rows, begin - shift:stop - shift]
        total = scratch[:len(part), :stop - begin]
        np.add(part, extra[begin:stop] if isinstance(extra, np.ndarray) else extra, out=total)
        for r in np.flatnonzero(need[rows] > np.maximum(begin, shift + first[rows])):
            total[r, :max(0, need[low + r] - begin)] = np.inf
        np.minimum(into[rows, begin:stop], total, out=into[rows, begin:stop])
