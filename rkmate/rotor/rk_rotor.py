"""rk-Rotor: the fastest persistent sequence of block operations for every memory budget at once.

Rockmate (ICML 2023), section 3.4 and appendix C.2, equations (1) to (3), in O(L^2 M (L + B)) for L
blocks, M memory slots and B options a block, with NumPy over slots and sub-problems.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rkmate.errors import ArgumentError
from rkmate.ir.chain import Backward, Chain, Floats, Forward, ForwardPlain, Ints, Op
from rkmate.rotor.memory_requirements import MemoryRequirements, Smallest, smallest
from rkmate.rotor.replay import Cost, replay

PERIOD = 4
"""A chain is searched for repeated sequences of up to this number of blocks."""
ROWS = 96
"""Sub-problems updated at once: their columns stay in the processor's cache."""
BUDGETS = 128
"""Budgets at which `Table.sequence` prepares a sequence in exact bytes; fewer for chains of more
than `LONG` blocks, in proportion to the square of their length, as each takes longer."""
LONG = 24
Least = tuple[MemoryRequirements, Smallest]
"""Memory needs of each choice of a chain, and the smallest memory of every sub-problem."""


# -- Tables ----------------------------------------------------------------------------------------
#
# Least times of all sub-problems at every number of memory slots.


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


class _Filling:
    """A table at work: ``time[row[s] + t, m]`` is Opt(s, t, m) of appendix C.2.

    Sub-problems are filled from the last first block to the first. Nothing here changes what
    `tests.rotor.reference` computes; all of it is about speed.
    """

    def __init__(self, needs: MemoryRequirements, slots: int, size: int, *, keep: bool) -> None:
        n = needs.blocks
        self.needs, self.slots, self.size, self.keep = needs, slots, size, keep
        # Rows t = s+1 .. L of one s stand together, so that shifting by memory is a slice.
        self.row = np.array([s * n - s * (s - 1) // 2 - (s + 1) for s in range(n)] + [0], dtype=np.int64)
        self.time = np.full((n * (n + 1) // 2, slots + 1), np.inf)
        self.first = np.full(len(self.time), slots + 1, dtype=np.int64)
        """First finite column of each row."""
        self.ideal = np.concatenate(([0.0], np.cumsum([o.seconds.min() for o in needs.options])))
        """Seconds below which blocks 0 .. i-1 cannot come."""
        self.scratch = np.empty((ROWS, slots + 1))
        self.shift, self.repeats = repeated(needs)

    def table(self) -> tuple[Ints, Floats]:
        """Return ``row`` and the filled ``time``."""
        for s in range(self.needs.blocks - 1, -1, -1):
            done = self._copy_repeated(s)
            self._options(s, self.needs.blocks, done)
            self._splits(s, self.needs.blocks, done)
        return self.row, self.time

    def _rows(self, s: int, low: int, high: int) -> slice:
        """Return the rows of sub-problems (s, low) .. (s, high)."""
        start = int(self.row[s])
        return slice(start + low, start + high + 1)

    def _slots(self, needed: Ints) -> Ints:
        """Return bytes as slots, rounded up."""
        result: Ints = -(-needed // self.size)
        return result

    def _copy_repeated(self, s: int) -> int:
        """Copy the sub-problems that are those of the block `shift` further on; how many they are."""
        done = int(self.repeats[s])
        if done:
            here, there = self._rows(s, s + 1, s + done), s + self.shift
            other = self._rows(there, there + 1, there + done)
            self.time[here] = self.time[other]
            self.first[here] = self.first[other]
        return done

    def _options(self, s: int, last: int, done: int) -> None:
        """Apply equation (1): block s with an option, then (s+1, t) in the remaining memory."""
        needs, options = self.needs, self.needs.options[s]
        mine = self.time[self._rows(s, s + 1, last)]
        end = np.full(last - s, self.slots + 1, dtype=np.int64)
        for k, cost in enumerate(options.seconds):
            need = self._slots(needs.option_rows(s, k)[:last - s])
            if need[0] <= self.slots and not done:
                np.minimum(mine[0, need[0]:], cost, out=mine[0, need[0]:])
            if self.keep and s + 1 < last:
                low = max(1, done)
                rest = self._rows(s + 1, s + 1 + low, last)
                _relax(mine[low:], self.time[rest], self.first[rest], -(-int(options.keep[k]) // self.size),
                       need[low:], cost, 0, end[low:], self.scratch)

    def _splits(self, s: int, last: int, done: int) -> None:
        """Apply equation (2): plain forwards to a cut i, then (i, t), then (s, i). Cuts come in
        ascending order, so that (s, i) is known when it is read."""
        needs, row = self.needs, int(self.row[s])
        mine = self.time[self._rows(s, s + 1, last)]
        ends = self._where_splits_pay(s, last, done)
        for i in range(s + 1, last):
            low = max(i - s, done)
            if i - s > done:
                self.first[row + i] = _first(self.time[row + i], self.slots)
            rest = self._rows(i, s + 1 + low, last)
            extra = self.time[row + i] + (needs.elapsed[i] - needs.elapsed[s])
            need = self._slots(needs.split_rows(s, i)[low - (i - s):last - i])
            _relax(mine[low:], self.time[rest], self.first[rest], -(-int(needs.between[s, i]) // self.size),
                   need, extra, int(self.first[row + i]), ends[low:, i - s - 1], self.scratch)
        if last - s > done:
            self.first[row + last] = _first(self.time[row + last], self.slots)

    def _where_splits_pay(self, s: int, last: int, done: int) -> Ints:
        """Return, for each t and i, the first column from which a split at i gains nothing: it recomputes at
        least the forwards before i, and an option already adds less."""
        needs = self.needs
        mine = self.time[self._rows(s, s + 1, last)]
        adds = (needs.elapsed[s + 1:last] - needs.elapsed[s]) * (1 - 1e-12)
        ends = np.empty((last - s, last - s - 1), dtype=np.int64)
        for r in range(done, last - s):
            best = self.ideal[s + 1 + r] - self.ideal[s]
            ends[r] = self.slots + 1 - np.searchsorted(mine[r, ::-1], best + adds, side="right")
        return ends


def repeated(needs: MemoryRequirements) -> tuple[int, Ints]:
    """Return a number of blocks d, and how many sub-problems (s, s+1), (s, s+2), ... of each block s are
    those of block s + d: layers of one kind are solved once. Zeros where nothing repeats."""
    n = needs.blocks
    best = 0, np.zeros(n, dtype=np.int64)
    for d in range(1, min(PERIOD, n - 1) + 1):
        same = np.zeros(n + 1, dtype=np.int64)
        for s in range(n - d - 1, -1, -1):
            if all(np.array_equal(a, b) for a, b in zip(
                    vars(needs.options[s]).values(), vars(needs.options[s + d]).values(), strict=True)) \
                    and needs.duration[s] == needs.duration[s + d]:
                most = min(int(same[s + 1]) + 1, n - 1 - d - s)
                equal = np.ones(most, dtype=bool)
                for table, start in ((needs.between, 1), (needs.run, 0)):
                    equal &= table[s, s + start:s + start + most] == \
                        table[s + d, s + d + start:s + d + start + most]
                equal &= needs.base[s + 1:s + 1 + most] == needs.base[s + d + 1:s + d + 1 + most]
                same[s] = most if equal.all() else int(np.argmin(equal))
        if same.sum() > best[1].sum():
            best = d, same[:n]
    return best


def _first(line: Floats, slots: int) -> int:
    return slots + 1 - int(np.isfinite(line).sum())     # finite from some column on


def _relax(into: Floats, rest: Floats, first: Ints, shift: int, need: Ints,
           extra: Floats | float, start: int, end: Ints, scratch: Floats) -> None:
    """Set ``into[r, m] = min(into[r, m], rest[r, m - shift] + extra[m])`` where need[r] <= m < end[r].

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


# -- Backtracking ----------------------------------------------------------------------------------
#
# From tables back to a sequence of operations, with budgets carried in exact bytes.
#
# Rockmate, appendix C, algorithm 3, with two differences. It is a loop, not a recursion: chains have
# hundreds of blocks. And the budget of a sub-problem is a number of bytes: only the look-up of what a
# sub-problem costs rounds (down) to slots, so the losses of rounding do not add up along the chain.


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


# -- Solving a chain -------------------------------------------------------------------------------


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
        self._top = Layer(needs, small, _Filling(needs, slots, slot_bytes, keep=keep).table())
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
