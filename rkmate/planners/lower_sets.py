"""Planners that choose a sequence of lower sets: the program of Kusumoto et al., and Chen's segments.

A strategy is an increasing sequence of lower sets, from the empty set (left out) to V. The boundary of each
is kept in the forward; in the backward, block by block, the rest is computed again
(`rkmate.planners.canonical`). The simulator says what each strategy really needs.

- `LowerSetProgram` solves the general recomputation problem (Kusumoto et al. 2019, sections 3 and 4).
  Equation (1) is the time that a strategy adds, equation (2) the memory that each block's backward needs.
  Equation (2) is a plain graph's model of memory; a captured graph has saved values, temporaries and
  gradients of its own. So `LowerSetPlanner` asks for strategies at several budgets of that model.
- `CHEN` has checkpoints at every sqrt(n)-th node (Chen et al. 2016, arXiv:1604.06174), as a sequence of lower
  sets (Kusumoto et al., section 2). Chen's heuristic for skip connections: a checkpoint may stand only where
  a single value crosses, so that no skip connection passes by it. Algorithm 3 of that paper chooses
  checkpoints by memory: a segment ends at the first such place after its values have reached b bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rkmate.errors import ArgumentError, RkmateError
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Floats, Ints
from rkmate.planners.canonical import Canonical, Dag, canonical, members, trained_forward, without_liveness
from rkmate.planners.protocol import Candidate, Fixed, Outcome, Problem, best, infeasible, judged

Family = Literal["exact", "pruned"]
Centric = Literal["time", "memory"]

TIME_LIMIT = 250.0
"""Seconds that the exact program may take, by estimate, where the caller names no limit."""
PAIR_SECONDS = 1e-6
"""About how long one budget takes per pair of lower sets, on one core: what estimates are made of."""
COLUMNS = 128
"""Sets whose steps are tabulated at once."""
KEPT_SETS = 4000
"""For up to this number of sets, the table of steps is kept for the next budget (about 400 MB)."""


class TooManyLowerSets(RkmateError):
    """The exact program would not end in reasonable time."""


MOST_STATES = 50_000
"""States that a count of lower sets tells apart, at most."""


def count_lower_sets(dag: Dag) -> int | None:
    """Count the lower sets, including the empty one; None if counting itself is too much work.

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
        if len(states) > MOST_STATES:
            return None
    return sum(states.values())


def all_lower_sets(dag: Dag) -> list[int]:
    """Return every lower set, by size. See `refuse_too_many` for whether that ends."""
    found = {0}
    todo = [0]
    while todo:
        lower = todo.pop()
        for v in range(len(dag)):
            more = lower | 1 << v
            if more != lower and dag.before[v] & ~lower == 0 and more not in found:
                found.add(more)
                todo.append(more)
    return sorted(found, key=lambda s: (s.bit_count(), s))


def estimated_seconds(count: int, budgets: int = 1) -> float:
    """Estimate the seconds of the program for `count` lower sets and `budgets` budgets."""
    return PAIR_SECONDS * count ** 2 * (budgets + 1)


def refuse_too_many(dag: Dag, time_limit: float, budgets: int) -> None:
    """Raise `TooManyLowerSets` where the exact program would take longer than `time_limit` seconds."""
    count = count_lower_sets(dag)
    if count is None:
        raise TooManyLowerSets(
            f"this graph of {len(dag)} nodes has more lower sets than can be counted; use the pruned "
            "family instead")
    seconds = estimated_seconds(count, budgets)
    if seconds > time_limit:
        raise TooManyLowerSets(
            f"this graph of {len(dag)} nodes has {count:,} lower sets; the exact program would take "
            f"about {seconds:,.0f} s, and has {time_limit:g} s: give it more, or use the pruned family")


def pruned_lower_sets(dag: Dag) -> list[int]:
    """Return the lower sets of section 4.3: for each node the nodes that it is reachable from; and the empty
    set and V."""
    found = {0, (1 << len(dag)) - 1}
    above: list[int] = []
    for v in range(len(dag)):
        lower = 1 << v
        for u in members(dag.before[v]):
            lower |= above[u]
        above.append(lower)
        found.add(lower)
    return sorted(found, key=lambda s: (s.bit_count(), s))


class _Steps(NamedTuple):
    """Costs of the steps from smaller sets to some sets: a row for each smaller set, a column for each
    set."""

    time: Floats
    """Equation (1): time of V_i without its boundary."""
    kept: Floats
    """Bytes that the step adds to U."""
    needs: Floats
    """Equation (2) without U_{i-1}."""
    subset: NDArray[np.bool_]
    """Whether the first set is inside of the second, so that there is a step."""


class LowerSetProgram:
    """The dynamic program of section 4.2 over one family, for any budget.

    O(F^2) pairs of the F lower sets, each with the undominated (time, memory) pairs of its prefix.
    """

    def __init__(self, dag: Dag, family: Family = "pruned", *, time_limit: float = TIME_LIMIT,
                 budgets: int = 1, time_steps: int | None = None) -> None:
        """`time_limit`: estimated seconds that the exact family may take for `budgets` budgets. `time_steps`:
        times count in whole steps of this fraction of T(V), so that few different sums exist; None: exact
        times.

        Raises `TooManyLowerSets` before it enumerates what would take longer.
        """
        if family not in ("exact", "pruned"):
            raise ArgumentError(f"family must be 'exact' or 'pruned', got {family!r}")
        if family == "exact":
            refuse_too_many(dag, time_limit, budgets)
        self.sets = all_lower_sets(dag) if family == "exact" else pruned_lower_sets(dag)
        n = len(dag)
        times = np.array(dag.times, dtype=float)
        if time_steps is not None and times.any():
            step = times.sum() / time_steps
            times = np.round(times / step) * step
        sizes = np.array(dag.sizes, dtype=float)      # exact below 2**53
        self._inside = np.array([_bits(s, n) for s in self.sets])
        self._outside = 1.0 - self._inside
        edge = np.array([_bits(dag.boundary(s), n) for s in self.sets])
        self._time = ((self._inside - edge) * times).T
        self._kept = (edge * sizes).T
        self._twice = 2.0 * (self._inside * sizes).T
        self._beyond = np.array([
            dag.bytes(dag.readers(s) & ~s) + dag.bytes(dag.read(dag.readers(s)) & ~s)
            for s in self.sets], dtype=float)
        self._made: dict[int, _Steps] = {}

    def _steps(self, k: int) -> _Steps:
        """Return the steps to set k, as rows from all smaller sets. Computed for `COLUMNS` sets at once, and
        kept as long as there are at most `KEPT_SETS`."""
        first = k - k % COLUMNS
        if first not in self._made:
            if len(self.sets) > KEPT_SETS:
                self._made.clear()
            last = min(len(self.sets), first + COLUMNS)
            to = slice(first, last)
            # What is outside of the smaller set is what the larger one adds.
            out = self._outside[:last]
            subset = self._inside[:last] @ self._outside[to].T == 0
            subset &= np.arange(last)[:, None] < np.arange(first, last)
            self._made[first] = _Steps(out @ self._time[:, to], out @ self._kept[:, to],
                                       out @ self._twice[:, to] + self._beyond[to], subset)
        at = k - first
        made = self._made[first]
        return _Steps(made.time[:k, at], made.kept[:k, at], made.needs[:k, at], made.subset[:k, at])

    def minimum_bytes(self) -> int:
        """Return the smallest budget with a strategy: bisection, each test keeps the least U per set."""
        low, high = 0.0, float(self._steps(len(self.sets) - 1).needs[0])  # one block is always a strategy
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
            steps = self._steps(k)
            usable = steps.subset & (kept[:k] + steps.needs <= budget)
            if usable.any():
                kept[k] = (kept[:k] + steps.kept)[usable].min()
        return bool(np.isfinite(kept[-1]))

    def solve(self, budget: int, centric: Centric = "time") -> tuple[int, ...] | None:
        """Return the lower sets, in order, of the strategy with the least (`time`) or the greatest (`memory`)
        overhead whose peak by equation (2) is within `budget` bytes; None when there is none. Section 4.4."""
        if centric not in ("time", "memory"):
            raise ArgumentError(f"centric must be 'time' or 'memory', got {centric!r}")
        sign = 1.0 if centric == "time" else -1.0
        prefixes = _Prefixes()
        for k in range(1, len(self.sets)):
            steps = self._steps(k)
            last, kept = prefixes.last, prefixes.kept
            usable = np.flatnonzero(steps.subset[last] & (kept + steps.needs[last] <= budget))
            source = last[usable]
            prefixes.add(k, prefixes.value[usable] + sign * steps.time[source],
                         kept[usable] + steps.kept[source], usable)
        whole = np.flatnonzero(prefixes.last == len(self.sets) - 1)
        if not len(whole):
            return None
        sets = []
        entry = int(whole[np.argmin(prefixes.value[whole])])
        while entry:
            sets.append(self.sets[int(prefixes.last[entry])])
            entry = int(prefixes.origin[entry])
        return tuple(reversed(sets))


class _Prefixes:
    """The undominated prefixes of strategies, in the order of the sets that they end in, as growing
    arrays."""

    def __init__(self) -> None:
        self._count = 1         # the first is the empty one
        self._value = np.zeros(1024)
        self._kept = np.zeros(1024)
        self._last = np.zeros(1024, dtype=np.int64)
        self._origin = np.zeros(1024, dtype=np.int64)

    @property
    def value(self) -> Floats:
        """Seconds; their negative where the greatest overhead is looked for."""
        return self._value[:self._count]

    @property
    def kept(self) -> Floats:
        """Bytes kept."""
        return self._kept[:self._count]

    @property
    def last(self) -> Ints:
        """Index of the set that each ends in."""
        return self._last[:self._count]

    @property
    def origin(self) -> Ints:
        """Return the index of the entry that each entry continues."""
        return self._origin[:self._count]

    def add(self, k: int, value: Floats, kept: Floats, origin: Ints) -> None:
        """Take up those that end in set k and that no other of them beats."""
        best = _undominated(value, kept)
        start, self._count = self._count, self._count + len(best)
        while self._count > len(self._value):
            for name in ("_value", "_kept", "_last", "_origin"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate((table, np.zeros_like(table))))
        new = slice(start, self._count)
        self._value[new], self._kept[new] = value[best], kept[best]
        self._last[new], self._origin[new] = k, origin[best]


def _bits(nodes: int, n: int) -> list[float]:
    return [float(nodes >> v & 1) for v in range(n)]


def _undominated(time: Floats, kept: Floats) -> Ints:
    """Return the indices of the entries that no other entry beats in both, by time."""
    order = np.lexsort((kept, time))
    least = np.minimum.accumulate(kept[order])
    first = np.ones(len(order), dtype=bool)
    first[1:] = kept[order][1:] < least[:-1]
    # Sums of the same numbers in another order differ in the last digits: no second entry for that.
    return order[first]


STRATEGY_BUDGETS = 12
"""Budgets of equation (2) that strategies are made for."""
TIME_STEPS = 500
"""Steps of T(V) in which measured times are counted."""


@dataclass(frozen=True)
class LowerSetPlanner:
    """A family of lower sets, time-centric or memory-centric (section 4.4), with or without liveness."""

    name: str
    family: Family = "pruned"
    centric: Centric = "time"
    liveness: bool = True

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`. `time_limit`: the exact family refuses graphs
        for which it would take longer."""
        try:
            limit = TIME_LIMIT if time_limit is None else time_limit
            candidates = problem.once(self.name, lambda: self._candidates(problem, limit))
        except TooManyLowerSets as error:
            return infeasible(str(error))
        if not candidates:
            return infeasible("block after block, the forward would draw random numbers in another "
                              "order")
        return best(candidates, budget)

    def _candidates(self, problem: Problem, time_limit: float) -> list[Candidate]:
        graph = problem.graph
        forward = trained_forward(graph, problem.block_c)
        dag = forward.dag
        if not len(dag):
            return [judged(problem, range(len(graph.c)), graph.loss)]
        program = LowerSetProgram(dag, self.family, time_limit=time_limit, budgets=STRATEGY_BUDGETS,
                                  time_steps=TIME_STEPS)
        low = program.minimum_bytes()
        high = 2 * dag.bytes((1 << len(dag)) - 1)    # one block for all: nothing needs more
        found: dict[tuple[int, ...], str] = {((1 << len(dag)) - 1,): "1 lower set"}
        for k in range(STRATEGY_BUDGETS):
            sets = program.solve(low + (high - low) * k * k // (STRATEGY_BUDGETS - 1) ** 2, self.centric)
            if sets is not None:
                found[sets] = f"{len(sets)} lower sets"
        result = []
        for sets, note in found.items():
            for last in (True, False):
                strategy = canonical(graph, forward.whole, forward.lift(sets), keep_last=last,
                                     by_blocks=not self.liveness)
                if self.liveness:
                    result.append(judged(problem, strategy.order, strategy.loss_at, note))
                elif _draws_in_order(graph, strategy):
                    schedule = without_liveness(graph, strategy)
                    seen = problem.simulate(schedule)
                    result.append(Candidate(schedule, seen.peak, seen.seconds, note))
        return result


def _draws_in_order(graph: CDGraph, strategy: Canonical) -> bool:
    """Return whether the first runs of random operations come as in the graph.

    Without liveness only the paper's order makes sense, block after block; a reordered forward
    would give other random numbers to each operation.
    """
    first = dict.fromkeys(c for c in strategy.order if graph.c[c].random)
    return list(first) == sorted(first)


CHEN_BUDGETS = 24
"""Number of values of b that algorithm 3 is tried with."""


def split_points(dag: Dag) -> list[int]:
    """Return nodes v after which v alone is still read: candidates for checkpoints."""
    last = [after.bit_length() - 1 for after in dag.after]
    ends: list[int] = [0] * len(dag)
    for u, reader in enumerate(last):
        if reader > u:
            ends[reader] += 1
    result = []
    open_ = 0        # nodes so far that are still to be read
    for v in range(len(dag)):
        open_ += (last[v] > v) - ends[v]
        if open_ == 1 and last[v] > v:
            result.append(v)
    return result


def sqrt_segments(dag: Dag) -> list[int]:
    """Lower sets that end at every floor(sqrt(n))-th of n split points, and V."""
    points = split_points(dag)
    stride = max(1, math.isqrt(len(points)))
    return _prefixes(dag, points[stride - 1::stride])


def memory_segments(dag: Dag, limit: int) -> list[int]:
    """Return the segments of algorithm 3: a segment ends at the first split point where it holds `limit`
    bytes."""
    points = set(split_points(dag))
    ends = []
    pinned = 0
    for v in range(len(dag)):
        pinned += dag.sizes[v]
        if v in points and pinned >= limit:
            ends.append(v)
            pinned = 0
    return _prefixes(dag, ends)


def _prefixes(dag: Dag, ends: Sequence[int]) -> list[int]:
    whole = (1 << len(dag)) - 1
    sets = [(1 << (v + 1)) - 1 for v in ends]
    return [*sets, whole] if whole not in sets else sets


def _chen(problem: Problem) -> list[Candidate]:
    """Return sqrt(n) segments, and those of algorithm 3 with several b."""
    forward = trained_forward(problem.graph, problem.block_c)
    dag = forward.dag
    whole = (1 << len(dag)) - 1
    total = dag.bytes(whole)
    found = {(whole,): "one segment", tuple(sqrt_segments(dag)): "sqrt(n) segments"}
    for k in range(1, CHEN_BUDGETS + 1):
        sets = tuple(memory_segments(dag, max(1, total * k // CHEN_BUDGETS)))
        found.setdefault(sets, f"segments of {total * k // CHEN_BUDGETS} bytes")
    strategies = [(canonical(problem.graph, forward.whole, forward.lift(sets),
                             keep_last=last, by_blocks=False), note)
                  for sets, note in found.items() for last in (True, False)]
    return [judged(problem, s.order, s.loss_at, note) for s, note in strategies]


CHEN = Fixed("chen", _chen)
