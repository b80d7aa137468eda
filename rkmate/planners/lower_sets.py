"""The general recomputation problem over lower sets (Kusumoto et al. 2019, sections 3 and 4).

A strategy is an increasing sequence of lower sets, from the empty set (left out) to V. The boundary
of each is kept in the forward; in the backward, block by block, the rest is computed again.
Equation (1) is the time that this adds, equation (2) the memory that each block's backward needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rkmate.errors import ArgumentError, RkmateError
from rkmate.ir.chain import Floats, Ints
from rkmate.planners.dag import Dag, members

Family = Literal["exact", "pruned"]
Centric = Literal["time", "memory"]

MOST_SETS = 4000
"""More lower sets than this, and the exact program refuses (it compares all pairs of them)."""


class TooManyLowerSets(RkmateError):
    """The exact program would not end in reasonable time.

    ``count`` is the number of lower sets, None where even counting them takes too long.
    """

    def __init__(self, message: str, count: int | None) -> None:
        super().__init__(message)
        self.count = count

    def __reduce__(self) -> tuple[type[TooManyLowerSets], tuple[str, int | None]]:
        return type(self), (str(self), self.count)


@dataclass(frozen=True)
class LowerSets:
    """A canonical strategy."""

    sets: tuple[int, ...]
    """The increasing lower sets, the last one is V; bits are nodes."""
    overhead: float
    """Equation (1): seconds of recomputation."""
    peak: int
    """Equation (2): bytes, without liveness analysis."""


def overhead(dag: Dag, sets: Sequence[int]) -> float:
    """Equation (1) of a sequence, in seconds."""
    result, before = 0.0, 0
    for lower in sets:
        result += dag.time(lower & ~before & ~dag.boundary(lower))
        before = lower
    return result


def peak(dag: Dag, sets: Sequence[int]) -> int:
    """Equation (2) of a sequence, in bytes."""
    result = kept = before = 0
    for lower in sets:
        own = dag.readers(lower) & ~lower
        others = dag.read(dag.readers(lower)) & ~lower
        result = max(result, dag.bytes(kept) + 2 * dag.bytes(lower & ~before) + dag.bytes(own)
                     + dag.bytes(others))
        kept |= dag.boundary(lower)
        before = lower
    return result


def count_lower_sets(dag: Dag, most_states: int = 50_000) -> int | None:
    """How many lower sets there are, the empty one included; None when the count itself is too
    much work.

    Node by node in topological order: of the nodes so far, only those matter that are still read.
    """
    last = [max(members(after), default=v) for v, after in enumerate(dag.after)]
    states = {0: 1}
    for v in range(len(dag)):
        new: dict[int, int] = {}
        open_ = sum(1 << u for u in range(v + 1) if last[u] > v)
        for inside, ways in states.items():
            with_v = [inside]
            if dag.before[v] & ~inside == 0:
                with_v.append(inside | 1 << v)
            for state in with_v:
                new[state & open_] = new.get(state & open_, 0) + ways
        states = new
        if len(states) > most_states:
            return None
    return sum(states.values())


def all_lower_sets(dag: Dag, most: int = MOST_SETS) -> list[int]:
    """Every lower set, by size; raises `TooManyLowerSets` when there are more than `most`."""
    found = {0}
    todo = [0]
    while todo:
        lower = todo.pop()
        for v in range(len(dag)):
            more = lower | 1 << v
            if more != lower and dag.before[v] & ~lower == 0 and more not in found:
                found.add(more)
                todo.append(more)
        if len(found) > most:
            count = count_lower_sets(dag)
            told = f"{count:,}" if count is not None else f"far more than {most:,}"
            raise TooManyLowerSets(
                f"this graph of {len(dag)} nodes has {told} lower sets; the exact program takes up "
                f"to {most:,}, use the pruned family instead", count)
    return sorted(found, key=lambda s: (s.bit_count(), s))


def pruned_lower_sets(dag: Dag) -> list[int]:
    """Section 4.3: for each node the nodes it is reachable from; and the empty set and V."""
    found = {0, (1 << len(dag)) - 1}
    above: list[int] = []
    for v in range(len(dag)):
        lower = 1 << v
        for u in members(dag.before[v]):
            lower |= above[u]
        above.append(lower)
        found.add(lower)
    return sorted(found, key=lambda s: (s.bit_count(), s))


class LowerSetProgram:
    """The dynamic program of section 4.2 over one family, for any budget.

    O(F^2) pairs of the F lower sets, each with the undominated (time, memory) pairs of its prefix.
    """

    def __init__(self, dag: Dag, family: Family = "pruned", most: int = MOST_SETS,
                 time_steps: int | None = None) -> None:
        """`most`: lower sets of the exact family. `time_steps`: times count in whole steps of this
        fraction of T(V), so that few different sums exist; None: as they are."""
        if family not in ("exact", "pruned"):
            raise ArgumentError(f"family must be 'exact' or 'pruned', got {family!r}")
        self.dag = dag
        self.sets = all_lower_sets(dag, most) if family == "exact" else pruned_lower_sets(dag)
        n, f = len(dag), len(self.sets)
        times = np.array(dag.times, dtype=float)
        if time_steps is not None and times.any():
            step = times.sum() / time_steps
            times = np.round(times / step) * step
        sizes = np.array(dag.sizes, dtype=float)      # exact below 2**53
        inside = np.array([[s >> v & 1 for v in range(n)] for s in self.sets], dtype=float)
        edge = np.array([b for s in self.sets for b in _bits(dag.boundary(s), n)]).reshape(f, n)
        beyond = np.array([
            dag.bytes(dag.readers(s) & ~s) + dag.bytes(dag.read(dag.readers(s)) & ~s)
            for s in self.sets], dtype=float)
        # Pairs [from, to]; what is outside of the smaller set is what the larger one adds.
        out = 1.0 - inside
        self.adds_time = out @ ((inside - edge) * times).T
        """Equation (1): time of V_i without its boundary."""
        self.adds_kept = out @ (edge * sizes).T
        """Bytes that the step adds to U."""
        self.needs = 2.0 * (out @ (inside * sizes).T) + beyond
        """Equation (2) without U_{i-1}."""
        self.subset = (inside @ out.T == 0) & (np.arange(f)[:, None] < np.arange(f))

    def minimum_bytes(self) -> int:
        """The smallest budget with a strategy: bisection, each test keeps the least U per set."""
        low, high = 0.0, float(self.needs[0, -1])      # one block is always a strategy
        while low < high:
            middle = float((low + high) // 2)
            if self._reaches(middle):
                high = middle
            else:
                low = middle + 1
        return int(high)

    def _reaches(self, budget: float) -> bool:
        kept = np.full(len(self.sets), np.inf)
        kept[0] = 0.0
        for k in range(1, len(self.sets)):
            usable = self.subset[:, k] & (kept + self.needs[:, k] <= budget)
            if usable.any():
                kept[k] = (kept + self.adds_kept[:, k])[usable].min()
        return bool(np.isfinite(kept[-1]))

    def solve(self, budget: int, centric: Centric = "time") -> LowerSets | None:
        """The strategy with the least (`time`) or the greatest (`memory`) overhead whose peak by
        equation (2) is within `budget` bytes; None when there is none. Section 4.4."""
        if centric not in ("time", "memory"):
            raise ArgumentError(f"centric must be 'time' or 'memory', got {centric!r}")
        sign = 1.0 if centric == "time" else -1.0
        f = len(self.sets)
        time: list[Floats] = [np.zeros(1)]
        kept: list[Floats] = [np.zeros(1)]
        origin: list[Ints] = [np.zeros(1, dtype=np.int64)]
        at: list[Ints] = [np.zeros(1, dtype=np.int64)]
        starts = np.zeros(f + 1, dtype=np.int64)
        starts[1] = 1
        all_time, all_kept = np.zeros(1), np.zeros(1)
        all_from = np.zeros(1, dtype=np.int64)
        for k in range(1, f):
            usable = np.flatnonzero(self.subset[all_from, k]
                                    & (all_kept + self.needs[all_from, k] <= budget))
            source = all_from[usable]
            t = all_time[usable] + sign * self.adds_time[source, k]
            m = all_kept[usable] + self.adds_kept[source, k]
            front = _undominated(t, m)
            time.append(t[front])
            kept.append(m[front])
            origin.append(source[front])
            at.append(usable[front] - starts[source[front]])
            starts[k + 1] = starts[k] + len(front)
            all_time = np.concatenate((all_time, t[front]))
            all_kept = np.concatenate((all_kept, m[front]))
            all_from = np.concatenate((all_from, np.full(len(front), k, dtype=np.int64)))
        if not len(time[-1]):
            return None
        sets = []
        k, entry = f - 1, int(np.argmin(time[-1]))
        while k:
            sets.append(self.sets[k])
            k, entry = int(origin[k][entry]), int(at[k][entry])
        sets.reverse()
        return LowerSets(tuple(sets), overhead(self.dag, sets), peak(self.dag, sets))


def _bits(nodes: int, n: int) -> list[float]:
    return [float(nodes >> v & 1) for v in range(n)]


def _undominated(time: Floats, kept: Floats) -> Ints:
    """Indices of the entries that no other beats in both, by time."""
    order = np.lexsort((kept, time))
    least = np.minimum.accumulate(kept[order])
    first = np.ones(len(order), dtype=bool)
    first[1:] = kept[order][1:] < least[:-1]
    # Sums of the same numbers in another order differ in the last digits: no second entry for that.
    return order[first]


def lower_sets(dag: Dag, budget: int, family: Family = "pruned",
               centric: Centric = "time") -> LowerSets | None:
    """Solve one graph for one budget in bytes; see `LowerSetProgram`."""
    return LowerSetProgram(dag, family).solve(budget, centric)
