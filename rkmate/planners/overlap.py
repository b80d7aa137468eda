"""Let collectives run while something else computes.

A planner's schedule waits for each collective where it starts. Afterwards, in the memory that the schedule
leaves unused, a collective that reads what is there early (a gathered parameter) starts ahead of its first
reader, and one whose result only leaves for autograd (a reduced gradient) is waited for later, with all that
is computed from it alone. (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
VLDB 2023, section 3.3, prefetch by one layer instead.)

Collectives run one after the other, in the order in which they start: every rank follows one schedule, so
the order is the same on all of them.

A planner that counts a collective at its full time would keep gathered parameters rather than activations,
although gathering them again costs next to nothing. Planners therefore see what is likely to stay exposed
(`exposed`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Clocks
from rkmate.ir.schedule import Compute, Free, Loss, Schedule, Start, Step, kernel_of
from rkmate.ir.simulate import simulate

EARLY = 2.0
"""Start a collective this multiple of its time before its result is read, if there is room."""


SEEN = 0.05
"""Part of a collective's time that planners count at least: no repetition is free."""


def exposed(graph: CDGraph, blocks: Sequence[Sequence[int]]) -> CDGraph:
    """Return the graph with only the time of each collective that is likely to stay exposed: what takes
    longer than the computations of its block, and of the blocks next to it.

    `blocks`: the C nodes of each block.
    """
    if not any(c.exchanges for c in graph.c):
        return graph
    seconds = np.zeros((2, 2, len(blocks)))             # forward or backward, computations or collectives
    for b, nodes in enumerate(blocks):
        for i in nodes:
            seconds[int(i >= graph.loss), int(graph.c[i].exchanges), b] += graph.c[i].time
    near = seconds.copy()
    near[..., 1:] += seconds[..., :-1]
    near[..., :-1] += seconds[..., 1:]
    costs = list(graph.c)
    for b, nodes in enumerate(blocks):
        for i in nodes:
            if costs[i].exchanges:
                computing, exchanging = near[int(i >= graph.loss), :, b]
                part = max(SEEN, 1 - computing / exchanging) if exchanging else 1.0
                costs[i] = replace(costs[i], time=float(part * costs[i].time))
    return replace(graph, c=tuple(costs))


@dataclass(frozen=True)
class _Tail:
    """The computations on the result of a collective, right after it, which can wait with it."""

    end: int
    """Index of the step after the last one."""
    latest: int
    """Index of the first step that cannot come before it."""
    holds: int
    """Bytes in memory until the wait, and not afterwards."""
    inside: int
    """Most bytes while it computes, above those afterwards."""


def overlapped(graph: CDGraph, schedule: Schedule, budget: int) -> Schedule:
    """Return a schedule at least as fast as `schedule`, whose collectives run while something else computes,
    within `budget` bytes.

    `schedule` itself must be within the budget. One that sends data away is returned as it is.
    """
    if schedule.copied or schedule.starts or not any(c.exchanges for c in graph.c):
        return schedule
    before = simulate(graph, schedule)
    room = budget - np.array(before.timeline, dtype=np.int64)
    plan = _Overlap(graph, schedule.steps, room)
    plan.start_ahead()
    found = Schedule(tuple(plan.with_late_waits(before.timeline)))
    after = simulate(graph, found)
    return found if after.peak <= budget and after.seconds < before.seconds else schedule


class _Overlap:
    """The state of one search."""

    def __init__(self, graph: CDGraph, steps: tuple[Step, ...], room: np.ndarray) -> None:
        """`room`: unused bytes at each step."""
        self.graph = graph
        self.steps = steps
        self.room = room
        self.ahead: dict[int, list[int]] = {}
        """Collectives that start before a step, in order."""
        clock = 0.0
        self.clock: list[float] = []
        """Seconds of all computations before each step, without collectives."""
        self.exchanges: list[int] = []
        """Steps that are collectives."""
        for k, step in enumerate(steps):
            self.clock.append(clock)
            if isinstance(step, Compute):
                if graph.c[step.c].exchanges:
                    self.exchanges.append(k)
                else:
                    clock += kernel_of(graph, step).time

    def _node(self, k: int) -> int:
        step = self.steps[k]
        assert isinstance(step, Compute)
        return step.c

    def _can_start(self, k: int) -> bool:
        node = self.graph.c[self._node(k)]
        return not node.donors and not node.alternatives

    # -- Starts ahead -------------------------------------------------------------------------

    def start_ahead(self) -> None:
        """Choose where collectives start, as late as is early enough for those that follow."""
        earliest = self._earliest()
        bound = [k for k in self.exchanges if earliest.get(k, k) == k]     # they start where they stand
        bound_at = [self.clock[k] for k in bound]
        bound_seconds = np.cumsum([0.0, *(self.graph.c[self._node(k)].time for k in bound)])
        following = float("inf")
        for k in reversed(self.exchanges):
            if k not in earliest or earliest[k] == k:
                continue
            node = self.graph.c[self._node(k)]
            end = min(self.clock[k], following)
            start = end - node.time
            while True:                 # others take their time meanwhile
                first, last = bisect_left(bound_at, start), bisect_right(bound_at, end)
                longer = end - node.time - (bound_seconds[last] - bound_seconds[first])
                if longer >= start:
                    break
                start = longer
            following = start
            wanted = bisect_right(self.clock, end - EARLY * (end - start)) - 1
            self._put(k, max(wanted, earliest[k]))
        for starts in self.ahead.values():
            starts.reverse()

    def _put(self, k: int, at: int) -> None:
        """Let the collective of step `k` start before step `at`, or later, where there is room for that."""
        node = self.graph.c[self._node(k)]
        needed = node.overhead + sum(self.graph.d[j].size for j in node.outputs)
        full = np.flatnonzero(self.room[at:k] < needed)
        at = at + int(full[-1]) + 1 if full.size else at
        while isinstance(self.steps[at], Free):         # it belongs to what computes before it
            at += 1
        if at < k and self.clock[at] < self.clock[k]:
            self.room[at:k] -= needed
            self.ahead.setdefault(at, []).append(k)

    def _earliest(self) -> dict[int, int]:
        """Return, for each collective that can start apart, the index of the first step that it may start
        before."""
        changed = dict.fromkeys(range(len(self.graph.d)), 0)      # D node -> step after its last change
        found: dict[int, int] = {}
        begin = 0
        for k, step in enumerate(self.steps):
            if isinstance(step, Loss):
                begin = k + 1
            elif isinstance(step, Free):
                changed[step.d] = k + 1
            elif isinstance(step, Compute):
                node = self.graph.c[step.c]
                if node.exchanges and self._can_start(k):
                    found[k] = max((begin, *(changed[j] for j in (*node.inputs, *node.outputs))))
                for j in node.outputs:
                    changed[j] = k + 1
        return found

    # -- Waits later --------------------------------------------------------------------------

    def with_late_waits(self, timeline: tuple[int, ...]) -> list[Step]:
        """Return the steps with the starts that were chosen, in which what computes from a reduced gradient
        comes when the collective has ended. `timeline`: the simulator's, of the steps as they were."""
        clocks, result = Clocks(None), list[Step]()
        started = {k for starts in self.ahead.values() for k in starts}
        late: dict[int, list[tuple[int, int]]] = {}
        k = 0
        while k < len(self.steps):
            for first, end in late.pop(k, ()):
                for step in self.steps[first:end]:
                    self._run(clocks, step)
                    result.append(step)
            for other in self.ahead.get(k, ()):
                clocks.start(self._node(other), self.graph.c[self._node(other)].time)
                result.append(Start(self._node(other)))
            step = self.steps[k]
            if isinstance(step, Compute) and self.graph.c[step.c].exchanges and k not in started \
                    and self._can_start(k):
                tail = self._tail(k, timeline)
                if tail is not None:
                    ends = clocks.start(step.c, self.graph.c[step.c].time)
                    at = self._waited_for(tail, self.clock[k] + ends - clocks.now)
                    self.room[tail.end:at] -= tail.holds
                    result.append(Start(step.c))
                    late.setdefault(at, []).append((k, tail.end))
                    k = tail.end
                    continue
            self._run(clocks, step)
            result.append(step)
            k += 1
        return result

    def _waited_for(self, tail: _Tail, clock: float) -> int:
        """Return the index of the step before which a tail computes: the first one after `clock`, if there is
        room until then."""
        at = min(bisect_left(self.clock, clock, tail.end), tail.latest)
        while at < tail.latest and isinstance(self.steps[at], Free):
            at += 1
        full = np.flatnonzero(self.room[tail.end:at + 1] < max(tail.holds, tail.inside))
        at = tail.end + int(full[0]) if full.size else at
        while isinstance(self.steps[at], Free):         # it belongs to what computes before it
            at -= 1
        return at

    def _run(self, clocks: Clocks, step: Step) -> None:
        if isinstance(step, Compute):
            clocks.run(step.c, kernel_of(self.graph, step).time, self.graph.c[step.c].exchanges)

    def _tail(self, k: int, timeline: tuple[int, ...]) -> _Tail | None:
        """Return what can wait with the collective of step `k`, if that ends in gradients of parameters."""
        graph, releases = self.graph, self.graph.releases
        made = set(graph.c[self._node(k)].outputs)
        ends = set(releases.values())
        end = k + 1
        while end < len(self.steps):
            step = self.steps[end]
            if isinstance(step, Compute):
                node = graph.c[step.c]
                if made.isdisjoint(node.inputs) or node.exchanges or end in self.ahead or step.c in ends:
                    break
                made.update(node.outputs)
            elif not isinstance(step, Free):
                break
            end += 1
        touched = {j for s in self.steps[k:end] if isinstance(s, Compute)
                   for j in (*graph.c[s.c].inputs, *graph.c[s.c].outputs)}
        touched.update(s.d for s in self.steps[k:end] if isinstance(s, Free))
        gone = {s.d for s in self.steps[k:end] if isinstance(s, Free)}
        left = made - gone
        if self._node(k) in ends or not left or not left.issubset(releases):
            return None
        last = {releases[j] for j in left}
        latest = end
        while latest < len(self.steps):
            step = self.steps[latest]
            if isinstance(step, Compute):
                node = graph.c[step.c]
                if step.c in last or not touched.isdisjoint(node.outputs) \
                        or not (made | gone).isdisjoint(node.inputs):
                    break
            elif isinstance(step, Free) and step.d in touched:
                break
            latest += 1
        while latest > end and (latest == len(self.steps) or isinstance(self.steps[latest], Free)):
            latest -= 1
        if latest == end:
            return None
        step = self.steps[end - 1]
        after = timeline[end - 1] - (kernel_of(graph, step).overhead if isinstance(step, Compute) else 0)
        return _Tail(end, latest, timeline[k] - after, max(timeline[k:end]) - after)
