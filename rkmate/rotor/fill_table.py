"""The tables of rk-Rotor: least times of all sub-problems at every number of memory slots.

Rockmate, appendix C.2, equations (1) to (3), and the third case of `rkmate.rotor.partial_saves`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rkmate.ir.chain import Floats, Ints
from rkmate.rotor.backtrack import Layer
from rkmate.rotor.memory_requirements import Needs
from rkmate.rotor.partial_saves import SPAN, Level
from rkmate.rotor.smallest import Smallest

PERIOD = 4
"""Chains are looked at for a sequence of up to so many blocks that comes again and again."""
ROWS = 96
"""Sub-problems updated at once: their columns stay in the processor's cache."""


def fill(needs: Needs, small: Smallest, levels: Sequence[Level], slots: int, size: int, *,
         keep: bool) -> tuple[Layer, ...]:
    """The tables: of the chain itself, then of its levels, for `slots` slots of `size` bytes."""
    found = [Layer(k.needs, k.small, _fill(k.needs, (), slots, size, span=SPAN, keep=True), k)
             for k in levels]
    return (Layer(needs, small, _fill(needs, found, slots, size, span=None, keep=keep)), *found)


def _fill(needs: Needs, levels: Sequence[Layer], slots: int, size: int, *, span: int | None,
          keep: bool) -> tuple[Ints, Floats]:
    """One table: ``time[row[s] + t, m]`` is Opt(s, t, m) of appendix C.2.

    `span`: only sub-problems of so many blocks at most. `levels`: those of the third case.
    """
    n = needs.blocks
    # Rows t = s+1 .. L of one s stand together, so that shifting by memory is a slice.
    row = np.array([s * n - s * (s - 1) // 2 - (s + 1) for s in range(n)] + [0], dtype=np.int64)
    time = np.full((n * (n + 1) // 2, slots + 1), np.inf)
    first = np.full(len(time), slots + 1, dtype=np.int64)    # first finite column of each row
    # Of each block alone: its best option, or its forward and the best of a level.
    alone = [min(o.seconds.min(), *(needs.elapsed[s + 1] - needs.elapsed[s]
                                    + k.needs.options[s].seconds.min() for k in levels), np.inf)
             for s, o in enumerate(needs.options)]
    ideal = np.concatenate(([0.0], np.cumsum(alone)))
    scratch = np.empty((ROWS, slots + 1))
    shift, repeats = (0, np.zeros(n, dtype=np.int64)) if levels or span else repeated(needs)
    for s in range(n - 1, -1, -1):
        start = int(row[s]) + s + 1
        last = n if span is None else min(n, s + span)
        mine = time[start:start + last - s]
        # So many sub-problems are those of the block `shift` further on.
        done = int(repeats[s])
        if done:
            other = int(row[s + shift]) + s + shift + 1
            mine[:done] = time[other:other + done]
            first[start:start + done] = first[other:other + done]
        options = needs.options[s]
        end = np.full(last - s, slots + 1, dtype=np.int64)
        for k, cost in enumerate(options.seconds):
            need = -(-needs.option_rows(s, k)[:last - s] // size)
            if need[0] <= slots and not done:
                np.minimum(mine[0, need[0]:], cost, out=mine[0, need[0]:])
            if keep and s + 1 < last:
                low = max(1, done)
                rest = slice(int(row[s + 1]) + s + 1 + low, int(row[s + 1]) + last + 1)
                _relax(mine[low:], time[rest], first[rest], -(-int(options.keep[k]) // size), need[low:],
                       cost, 0, end[low:], scratch)
        # A split at i recomputes the forwards before i at least: where an option already adds less,
        # it has nothing to offer.
        adds = (needs.elapsed[s + 1:last] - needs.elapsed[s]) * (1 - 1e-12)
        ends = np.empty((last - s, last - s - 1), dtype=np.int64)
        for r in range(done, last - s):
            best = ideal[s + 1 + r] - ideal[s]
            ends[r] = slots + 1 - np.searchsorted(mine[r, ::-1], best + adds, side="right")
        for i in range(s + 1, last):
            here = int(row[s]) + i
            low = max(i - s, done)
            if i - s > done:
                first[here] = _first(time[here], slots)
            rest = slice(int(row[i]) + s + 1 + low, int(row[i]) + last + 1)
            extra = time[here] + (needs.elapsed[i] - needs.elapsed[s])
            need = needs.split_rows(s, i)[low - (i - s):last - i]
            _relax(mine[low:], time[rest], first[rest], -(-int(needs.between[s, i]) // size),
                   -(-need // size), extra, int(first[here]), ends[low:, i - s - 1], scratch)
            if i <= s + SPAN:
                below = int(row[i]) + i + 1
                for layer in levels:
                    _keep(needs, layer, s, i, mine[i - s:], time[below:below + n - i],
                          first[below:below + n - i], size, ideal, scratch)
        if last - s > done:
            first[int(row[s]) + last] = _first(time[int(row[s]) + last], slots)
    return row, time


def repeated(needs: Needs) -> tuple[int, Ints]:
    """A number of blocks d, and how many sub-problems (s, s+1), (s, s+2), ... of each block s are those of
    block s + d: layers of one kind are solved once. Zeros where nothing repeats."""
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


def _keep(needs: Needs, layer: Layer, s: int, i: int, into: Floats, rest: Floats, first: Ints,
          size: int, ideal: Floats, scratch: Floats) -> None:
    """The third case: forwards of s .. i-1 that keep a level's data, for every t in i+1 .. L."""
    assert layer.level is not None
    row, time = layer.table
    if not layer.needs.inside[s, i]:
        return
    slots = into.shape[1] - 1
    line = time[row[s] + i]
    start = _first(line, slots)
    if start > slots:
        return
    elapsed = needs.elapsed[i] - needs.elapsed[s]
    # No faster than the forwards, the level's best, and the best of what follows.
    least = (elapsed + float(line[-1]) + ideal[i + 1:] - ideal[i]) * (1 + 1e-12)
    end = np.array([slots + 1 - np.searchsorted(mine[::-1], best, side="right")
                    for mine, best in zip(into, least, strict=True)], dtype=np.int64)
    _relax(into, rest, first, -(-int(layer.needs.between[s, i]) // size),
           -(-layer.level.first_rows(s, i) // size), line + elapsed, start, end, scratch)


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
