"""What could be away when: the gaps between two uses of a forward value, in a schedule without copies.

Time is counted in *moments*: a computation, or the loss, with the steps that free right after it. Copies are
begun and waited for at the boundaries between moments; boundary k stands before moment k.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Link
from rkmate.ir.schedule import Compute, Free, Loss, Schedule, in_place_donor, kernel_of
from rkmate.ir.simulate import simulate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Gaps:
    """The moments of a schedule, and its gaps, by D node and then by time: one entry of each array from `d`
    on for each gap."""

    schedule: Schedule
    begins: Ints
    """The index of each moment's first step; at the end, the number of steps."""
    memory: Ints
    """Most bytes during each moment, or right before it."""
    before: Floats
    """Seconds of computing before each boundary."""
    loss: int
    """The moment of the loss."""
    d: Ints
    """The D node."""
    made: Ints
    """The moment that it is made in, before the gap."""
    last: Ints
    """The moment of its last use before the gap."""
    next: Ints
    """The moment of its first use after the gap."""
    may_free: Ints
    """The first boundary at which it may be freed, where it need not be copied first."""
    size: Ints
    """Bytes."""
    out: Floats
    """Seconds of a copy out."""
    back: Floats
    """Seconds of a copy back."""

    @property
    def least(self) -> int:
        """The peak where all that has a gap is away from its first moment to its last, without buffers: no
        copies make a smaller one."""
        change = np.zeros(len(self.memory) + 1, dtype=np.int64)
        np.add.at(change, self.last + 1, -self.size)
        np.add.at(change, self.next, self.size)
        return int((self.memory + np.cumsum(change)[:-1]).max(initial=0))


def may_be_sent(graph: CDGraph, pinned: Collection[int], *, gradients: bool = False) -> list[bool]:
    """Per D node, whether it may be away: a forward value that nobody else holds or waits for. `gradients`:
    or a value of the backward."""
    held = {*pinned, *graph.outputs, *graph.decided, *graph.input_grads, *graph.releases}
    return [made is not None and (gradients or made < graph.loss) and node.size > 0 and j not in held
            for j, (node, made) in enumerate(zip(graph.d, graph.producer, strict=True))]


def gaps_of(graph: CDGraph, schedule: Schedule, pinned: Collection[int] = (),
            reserve_at_loss: int = 0) -> Gaps:
    """The gaps of a schedule that copies nothing. `graph.link` says how long copies take."""
    assert graph.link is not None
    timeline = simulate(graph, schedule, pinned=pinned, reserve_at_loss=reserve_at_loss).timeline
    sendable = may_be_sent(graph, pinned)
    begins: list[int] = []
    memory: list[int] = []
    seconds: list[float] = []
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    giving: dict[int, bool] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    loss = 0
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            memory[-1] = max(memory[-1], timeline[k])
            continue
        m = len(begins)
        begins.append(k)
        memory.append(timeline[k])
        if isinstance(step, Loss):
            seconds.append(0.0)
            loss = m
            continue
        assert isinstance(step, Compute)
        node, kernel = graph.c[step.c], kernel_of(graph, step)
        seconds.append(kernel.time)
        donor = in_place_donor(graph, schedule.steps, k)
        if donor is not None:       # right before there may be more than there is with its output
            memory[-1] = max(memory[-1], timeline[k] - kernel.overhead - graph.bytes(node.outputs)
                             + graph.d[donor].size)
        for j in set(node.inputs):
            if sendable[j]:
                if used[j] < m - 1:
                    rows.append((j, made[j], used[j], m, used[j] + (2 if giving[j] else 1)))
                used[j], giving[j] = m, j in node.donors
        for j in node.outputs:
            if sendable[j]:
                made[j] = used[j] = m
                giving[j] = False
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    size = np.array([graph.d[j].size for j in table[:, 0]], dtype=np.int64)
    link: Link = graph.link
    d, before, last, following, may_free = (np.ascontiguousarray(table[:, k]) for k in range(5))
    return Gaps(schedule, np.array([*begins, len(schedule.steps)], dtype=np.int64),
                np.array(memory, dtype=np.int64), np.concatenate([[0.0], np.cumsum(seconds)]), loss,
                d, before, last, following, may_free, size,
                np.array([link.seconds_out(n) for n in size.tolist()]),
                np.array([link.seconds_in(n) for n in size.tolist()]))
