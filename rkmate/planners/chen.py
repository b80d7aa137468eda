"""Sublinear memory: checkpoints at every sqrt(n)-th node (Chen et al. 2016, arXiv:1604.06174).

The checkpoints are a sequence of lower sets (Kusumoto et al. 2019, section 2). Chen's heuristic for
skip connections: a checkpoint may stand only where a single value crosses, so that no skip
connection passes by it. Algorithm 3 of the paper chooses checkpoints by memory: a segment ends at
the first such place after its values have reached b bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rkmate.planners.canonical import canonical
from rkmate.planners.dag import Dag, trained_forward
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, judged

BUDGETS = 24
"""How many values of b algorithm 3 is tried with."""


def split_points(dag: Dag) -> list[int]:
    """Nodes v after which v alone is still read: candidates for checkpoints."""
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
    """Algorithm 3: a segment ends at the first split point where it holds `limit` bytes."""
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


@dataclass(frozen=True)
class Chen:
    """sqrt(n) segments and algorithm 3 with several b; the fastest that fits is taken."""

    name: str = "chen"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        def make() -> list[Candidate]:
            forward = trained_forward(problem.graph, problem.block_c, problem.pinned)
            dag = forward.dag
            whole = (1 << len(dag)) - 1
            total = dag.bytes(whole)
            found = {(whole,): "one segment", tuple(sqrt_segments(dag)): "sqrt(n) segments"}
            for k in range(1, BUDGETS + 1):
                sets = tuple(memory_segments(dag, max(1, total * k // BUDGETS)))
                found.setdefault(sets, f"segments of {total * k // BUDGETS} bytes")
            strategies = [(canonical(problem.graph, forward.whole, forward.lift(sets),
                                     keep_last=last, by_blocks=False), note)
                          for sets, note in found.items() for last in (True, False)]
            return [judged(problem, s.order, s.loss_at, note) for s, note in strategies]

        return best(problem.once(self.name, make), budget)
