"""DTR replayed over a captured graph: a static schedule from a run-time policy, without a solver.

Kirisame et al., ICLR 2021 (appendix E.3 suggests it). Computations run in the graph's order within
a memory limit. When there is no room, the value with the least h = cost / (size * staleness) is
evicted, cost being the time to make it and its evicted neighbourhood again (h_DTR^eq: union-find
over evicted values, section 4.1 and appendix C.2). What is needed and not there is computed again,
recursively. Gradients are never evicted. Ties go to the lower index, so the result is
deterministic.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rkmate.ir.cd import CDGraph
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, judged, whole_step

LEVELS = 16
"""Memory limits that the policy is replayed with."""
FAILED = 2
"""Limits without a schedule after which lower ones are not tried."""
LIMIT = 8.0
"""A replay that takes this many times the step's own time is given up."""


class OfflineDtr:
    """A run of the policy."""

    def __init__(self, graph: CDGraph, limit: int) -> None:
        self.graph = graph
        self.limit = limit
        self.held = set(graph.held)
        self.order: list[int] = []
        self.loss_at = len(graph.c)
        self._there: set[int] = set()
        self._live = 0
        self._clock = 0.0
        self._access = [0.0] * len(graph.d)
        self._uses = [len(r) for r in graph.readers]
        for j in (*graph.outputs, *graph.input_grads):
            self._uses[j] += 1        # the loss, or the caller, reads it
        for j in graph.releases:
            self._uses[j] += 1
        self._locks = [0] * len(graph.d)
        self._class = list(range(len(graph.d)))
        self._cost = [0.0] * len(graph.d)
        self._leaves: dict[int, list[int]] = {}
        for j, i in graph.releases.items():
            self._leaves.setdefault(i, []).append(j)

    def run(self) -> bool:
        """Replay the whole step; False when it does not fit or takes too long."""
        graph = self.graph
        most = LIMIT * sum(c.time for c in graph.c)
        for t, node in enumerate(graph.c):
            if t == graph.loss and not self._loss():
                return False
            if not self._compute(t) or self._clock > most or len(self.order) > 16 * len(graph.c):
                return False
            for j in (*node.inputs, *self._leaves.get(t, ())):
                self._release(j)
        return graph.loss < len(graph.c) or self._loss()

    def _loss(self) -> bool:
        graph = self.graph
        for j in graph.outputs:
            made = graph.producer[j]
            if made is not None and j not in self._there and not self._compute(made):
                return False
            self._locks[j] += 1
        arriving = graph.bytes(graph.output_grads)
        if not self._make_room(arriving):
            return False
        self.loss_at = len(self.order)
        for j in graph.output_grads:
            self._there.add(j)
            if not self._uses[j]:
                self._there.discard(j)
        self._live += graph.bytes(j for j in graph.output_grads if j in self._there)
        for j in graph.outputs:
            self._locks[j] -= 1
            self._release(j)
        return True

    def _release(self, j: int) -> None:
        self._uses[j] -= 1
        if not self._uses[j] and j in self._there and j not in self.held and not self._locks[j]:
            self._drop(j)

    def _compute(self, c: int) -> bool:
        """Run a node, after whatever its inputs need."""
        graph = self.graph
        pending = [c]
        self._lock(c)
        while pending:
            i = pending[-1]
            missing = next((j for j in graph.c[i].inputs if j not in self._there
                            and graph.producer[j] is not None), None)
            if missing is not None:
                made = graph.producer[missing]
                assert made is not None and made < graph.loss
                pending.append(made)
                self._lock(made)
                continue
            node = graph.c[i]
            if not self._make_room(graph.bytes(node.outputs) + node.overhead):
                return False
            self.order.append(i)
            self._clock += node.time
            pending.pop()
            for j in node.outputs:
                if j not in self._there:
                    self._there.add(j)
                    self._live += graph.d[j].size
                    self._rejoin(j)
                self._access[j] = self._clock
            for j in node.inputs:
                self._locks[j] -= 1
            for j in (*node.inputs, *node.outputs):
                # Made again for another value's sake, or never read at all.
                if (not self._uses[j] and not self._locks[j] and j in self._there
                        and j not in self.held):
                    self._drop(j)
        return True

    def _lock(self, c: int) -> None:
        for j in self.graph.c[c].inputs:
            self._locks[j] += 1
            self._access[j] = self._clock

    def _make_room(self, extra: int) -> bool:
        graph = self.graph
        while self._live + extra > self.limit:
            chosen, least = -1, float("inf")
            for j in sorted(self._there):
                made = graph.producer[j]
                size = graph.d[j].size
                if (made is None or made >= graph.loss or self._locks[j] or j in self.held
                        or not size):
                    continue
                h = self._projected(j) / (size * max(self._clock - self._access[j], 1e-12))
                if h < least:
                    chosen, least = j, h
            if chosen < 0:
                return False
            self._drop(chosen)
        return True

    def _projected(self, j: int) -> float:
        made = self.graph.producer[j]
        assert made is not None
        roots = {self._find(k) for k in self._neighbours(j)}
        return self.graph.c[made].time + sum(self._cost[r] for r in roots)

    def _neighbours(self, j: int) -> list[int]:
        """Return the evicted forward values next to one: its inputs, and the values that are made from it."""
        graph = self.graph
        made = graph.producer[j]
        near = list(graph.c[made].inputs) if made is not None else []
        for r in graph.readers[j]:
            if r < graph.loss:
                near += graph.c[r].outputs
        last = self.order[-1] if self.order else -1
        return [k for k in near if k not in self._there and (p := graph.producer[k]) is not None
                and (p <= last or self._access[k] > 0)]

    def _drop(self, j: int) -> None:
        self._there.discard(j)
        self._live -= self.graph.d[j].size
        made = self.graph.producer[j]
        if made is None or made >= self.graph.loss:
            return
        self._class[j] = j
        self._cost[j] = self.graph.c[made].time
        for k in self._neighbours(j):
            a, b = self._find(j), self._find(k)
            if a != b:
                self._class[b] = a
                self._cost[a] += self._cost[b]

    def _rejoin(self, j: int) -> None:
        made = self.graph.producer[j]
        root = self._find(j)
        if made is not None and made < self.graph.loss and root != j:
            self._cost[root] = max(0.0, self._cost[root] - self.graph.c[made].time)

    def _find(self, j: int) -> int:
        path = []
        while self._class[j] != j:
            path.append(j)
            j = self._class[j]
        for k in path:
            self._class[k] = j
        return j


def dtr_order(graph: CDGraph, limit: int) -> tuple[list[int], int] | None:
    """Return the order of C nodes that the policy makes within `limit` bytes, and where the loss stands; None
    when something does not fit or when it computes more than `LIMIT` times the step."""
    replay = OfflineDtr(graph, limit)
    return (replay.order, replay.loss_at) if replay.run() else None


@dataclass(frozen=True)
class DtrOffline:
    """The policy at a fixed set of limits, from the top; the fastest schedule that fits is taken.

    The schedule of a limit depends only on the problem, so each limit is replayed once. If the time is over
    before all limits are replayed, the next call has time for the others.
    """

    name: str = "dtr"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        limit = float("inf") if time_limit is None else time_limit
        start = time.perf_counter()
        whole = whole_step(problem)
        found = [replace(whole, note="nothing recomputed")]
        replayed: dict[int, Candidate | None] = problem.once(self.name, dict)
        failed, late = 0, False
        for level in range(LEVELS - 1, 0, -1):
            if level not in replayed:
                if time.perf_counter() - start >= limit:
                    late = True
                    break
                replayed[level] = self._replayed(problem, whole.peak * level // LEVELS)
            candidate = replayed[level]
            if candidate is not None:
                found.append(candidate)
                continue
            failed += 1
            if failed == FAILED:
                break
        note = f"lower limits not tried within {limit:g} s" if late else ""
        outcome = best(found, budget, note)
        if outcome.schedule is None and late:
            return Outcome(None, "timeout", float("inf"), note=note)
        return outcome

    def _replayed(self, problem: Problem, memory: int) -> Candidate | None:
        found = dtr_order(problem.graph, memory)
        return None if found is None else judged(problem, *found, f"policy at {memory} bytes")
