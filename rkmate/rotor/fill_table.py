"""The tables of rk-Rotor: least times of all sub-problems at every number of memory slots.

Rockmate, appendix C.2, equations (1) to (3), and the third case of `rkmate.rotor.partial_saves`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rkmate.ir.chain import Floats, Ints
from rkmate.rotor.backtrack import Layer
from rkmate.rotor.memory_requirements import MemoryRequirements, Smallest
from rkmate.rotor.partial_saves import SPAN, PartialSaves

PERIOD = 4
"""A chain is searched for repeated sequences of up to this number of blocks."""
ROWS = 96
"""Sub-problems updated at once: their columns stay in the processor's cache."""


def fill_tables(needs: MemoryRequirements, small: Smallest, saves: Sequence[PartialSaves], slots: int,
                size: int, *, keep: bool) -> tuple[Layer, ...]:
    """Return the tables for `slots` slots of `size` bytes: of the chain itself, then of where its partial
    saves of each index are in memory."""
    found = [Layer(k.needs, k.small, _Filling(k.needs, (), slots, size, span=SPAN, keep=True).table(), k)
             for k in saves]
    top = _Filling(needs, found, slots, size, span=None, keep=keep).table()
    return (Layer(needs, small, top), *found)


class _Filling:
    """A table at work: ``time[row[s] + t, m]`` is Opt(s, t, m) of appendix C.2.

    Sub-problems are filled from the last first block to the first. `span`: only those of at most
    this number of blocks. `layers`: the tables of the third case. Nothing here changes what
    `tests.rotor.reference` computes; all of it is about speed.
    """

    def __init__(self, needs: MemoryRequirements, layers: Sequence[Layer], slots: int, size: int, *,
                 span: int | None, keep: bool) -> None:
        n = needs.blocks
        self.needs, self.layers, self.slots, self.size = needs, layers, slots, size
        self.span = n if span is None else span
        self.keep = keep
        # Rows t = s+1 .. L of one s stand together, so that shifting by memory is a slice.
        self.row = np.array([s * n - s * (s - 1) // 2 - (s + 1) for s in range(n)] + [0], dtype=np.int64)
        self.time = np.full((n * (n + 1) // 2, slots + 1), np.inf)
        self.first = np.full(len(self.time), slots + 1, dtype=np.int64)
        """First finite column of each row."""
        # Of each block alone: its best option, or its forward and the best that a partial save allows.
        alone = [min(o.seconds.min(), *(needs.elapsed[s + 1] - needs.elapsed[s]
                                        + k.needs.options[s].seconds.min() for k in layers), np.inf)
                 for s, o in enumerate(needs.options)]
        self.ideal = np.concatenate(([0.0], np.cumsum(alone)))
        """Seconds below which blocks 0 .. i-1 cannot come."""
        self.scratch = np.empty((ROWS, slots + 1))
        self.shift, self.repeats = (0, np.zeros(n, dtype=np.int64)) if layers or span else repeated(needs)

    def table(self) -> tuple[Ints, Floats]:
        """Return ``row`` and the filled ``time``."""
        for s in range(self.needs.blocks - 1, -1, -1):
            last = min(self.needs.blocks, s + self.span)
            done = self._copy_repeated(s)
            self._options(s, last, done)
            self._splits(s, last, done)
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
        """Apply equation (2): plain forwards to a cut i, then (i, t), then (s, i); and the third case. Cuts
        come in ascending order, so that (s, i) is known when it is read."""
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
            if i <= s + SPAN:
                for layer in self.layers:
                    self._saving(layer, s, i)
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

    def _saving(self, layer: Layer, s: int, i: int) -> None:
        """Apply the third case: forwards of s .. i-1 that make partial saves, for every t in i+1 .. L."""
        assert layer.saves is not None
        row, time = layer.table
        if not layer.needs.inside[s, i]:
            return
        line = time[row[s] + i]
        start = _first(line, self.slots)
        if start > self.slots:
            return
        n, ideal, below = self.needs.blocks, self.ideal, self._rows(i, i + 1, self.needs.blocks)
        into = self.time[self._rows(s, i + 1, n)]
        elapsed = self.needs.elapsed[i] - self.needs.elapsed[s]
        # No faster than the forwards, the best with the saves, and the best of what follows.
        least = (elapsed + float(line[-1]) + ideal[i + 1:] - ideal[i]) * (1 + 1e-12)
        end = np.array([self.slots + 1 - np.searchsorted(mine[::-1], best, side="right")
                        for mine, best in zip(into, least, strict=True)], dtype=np.int64)
        _relax(into, self.time[below], self.first[below], -(-int(layer.needs.between[s, i]) // self.size),
               self._slots(layer.saves.first_rows(s, i)), line + elapsed, start, end, self.scratch)


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
                for table, start in ((needs.inside, 1), (needs.between, 1), (needs.run, 0)):
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
