"""What to save at a few checkpoint times: an integer program on the whole graph, and a lower bound.

A checkpoint time is the loss, or a backward node. For each, K says which forward values are in memory
when it comes; between two of them R says which forward nodes run again. A backward node finds what it
reads among what was kept or made anew since the last one, and so does a node that runs again. Memory is
limited at checkpoint times only, which makes the program a relaxation: no schedule that runs each
backward node once, in the graph's order, takes less time than its optimum (Checkmate's program, Jain et
al., MLSys 2020, section 4, has a checkpoint time per node). Times are added where a solution turns out
to need too much. Where the graph has a link, values may also be sent away (`save_set_copies`).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rkmate.ilp.highs import Highs
from rkmate.ilp.rows import Rows
from rkmate.ir.cd import CDGraph
from rkmate.ir.gradients import gradient_memory
from rkmate.ir.kernels import fastest
from rkmate.ir.simulate import LOSS_SCALARS
from rkmate.planners.offload_gaps import may_be_sent
from rkmate.planners.save_set_copies import Copies

GAP = 0.01
"""Relative gap, of what runs again, at which a solution is good enough."""
NODES = 30
"""Branch-and-bound nodes per program: where this count ends a solve, the result is the same on every
machine. The limit in seconds comes on top, and where that ends it, the result is the machine's."""


@dataclass(frozen=True)
class SaveSets:
    """A solution."""

    keep: tuple[frozenset[int], ...]
    """Forward D nodes in memory at each checkpoint time."""
    bound: float
    """No schedule of the class takes fewer seconds for what runs again, waits for copies included."""
    sent: frozenset[int] = frozenset()
    """Forward D nodes that are copied away, and back."""


class SaveSetProgram:
    """The program of a graph, for any budget and any checkpoint times."""

    def __init__(self, graph: CDGraph, pinned: Iterable[int] = (), reserve_at_loss: int = 0) -> None:
        self.graph = graph
        self.pinned = frozenset(pinned)
        self.reserve_at_loss = reserve_at_loss
        self.seconds = sum(c.time for c in graph.c)
        self.made = [-1 if i is None else i for i in graph.producer]
        """The C node of each D node; -1: what comes from outside."""
        self.reads = [tuple(j for j in c.inputs if self.forward(j)) for c in graph.c]
        """The forward values among each C node's inputs."""
        self.sendable = may_be_sent(graph, self.pinned)
        """The forward values that may be copied away; used where the graph has a link."""
        self._gradients = gradient_bytes(graph, self.pinned)
        self._programs: dict[tuple[int, ...], _Program] = {}
        # Seconds that it took to write the latest of them; one with more times takes longer.
        self._writing = 0.0

    def forward(self, j: int) -> bool:
        """Whether a D node is made by a forward node: what the program chooses to keep or make anew.
        Inputs of the model and gradients are not; their bytes are `fixed_bytes`, or nobody's."""
        made = self.graph.producer[j]
        return made is not None and made < self.graph.loss

    def fixed_bytes(self, at: int | None) -> int:
        """Memory besides forward values, at a backward node or (None) at the loss: gradients, what
        the node allocates."""
        pinned = self.graph.bytes(self.pinned)
        if at is not None:
            return pinned + self._gradients[at - self.graph.loss]
        arriving = self.graph.bytes(self.graph.output_grads) + min(LOSS_SCALARS, self.reserve_at_loss)
        return pinned + max(arriving, self.reserve_at_loss)

    @cached_property
    def least_bytes(self) -> int:
        """What some backward node needs by itself: nothing fits in less."""
        graph = self.graph
        return max((self.fixed_bytes(b) + graph.bytes(
            j for j in graph.c[b].inputs if self.forward(j) and j not in self.pinned)
            for b in graph.backward), default=0)

    def solve(self, budget: int, times: Sequence[int], *, time_limit: float) -> SaveSets | None:
        """The least time for what runs again; None when nothing fits or nothing is found.

        `times`: backward nodes, in order; the loss is one, too.
        """
        key = tuple(times)
        if key not in self._programs:
            if self._writing > time_limit:
                return None         # the time would be over before it is written
            start = time.perf_counter()
            self._programs[key] = _Program(self, [self.graph.loss, *times])
            self._writing = time.perf_counter() - start
        return self._programs[key].solve(budget, time_limit)


class _Program:
    def __init__(self, owner: SaveSetProgram, times: Sequence[int]) -> None:
        graph = owner.graph
        self.byte = max(1, sum(d.size for d in graph.d) // 4096)
        self.second = owner.seconds / 1000 or 1.0
        ends = [*times[1:], len(graph.c)]
        self.needed = _closures(owner, list(zip(times, ends, strict=True)))
        self.highs = Highs(self._write(owner, times, ends))

    def _write(self, owner: SaveSetProgram, times: Sequence[int], ends: Sequence[int]) -> Rows:
        graph, reads, made = owner.graph, owner.reads, owner.made
        program = Rows()
        K = [{j: program.column(f"K_{t}_{j}", int(j in owner.pinned), 1, integer=True) for j in needed}
             for t, needed in enumerate(self.needed)]
        # What runs again may do so by another kernel.
        R = [{i: program.column(f"R_{t}_{i}", 0, 1, fastest(graph.c[i]) / self.second)
              for i in dict.fromkeys(made[j] for j in needed)} for t, needed in enumerate(self.needed)]
        budget = program.column("budget", 0)
        copies = None if graph.link is None else Copies(
            program, graph, graph.link, owner.sendable, self.needed, self.second, self.byte)
        if copies is not None:
            copies.write(K[0], R, times)
        self.sendable = [] if copies is None else copies.sent

        def comes(t: int, j: int) -> tuple[int, ...]:
            return () if copies is None else copies.back(t, j)

        for t, (start, end) in enumerate(zip(times, ends, strict=True)):
            keep, again = K[t], R[t]
            for i, v in again.items():
                for j in reads[i]:
                    program.at_least(0, (keep[j], again[made[j]], *comes(t, j)), (v,))
            for b in range(start, end):
                for j in reads[b]:
                    there = (keep[j],) if t and b == start else (
                        keep[j], again[made[j]], *comes(t, j))
                    program.at_least(1, there)
            if t:
                before, ran = K[t - 1], R[t - 1]
                for j, v in keep.items():
                    program.at_least(0, (before[j], ran[made[j]], *comes(t - 1, j)), (v,))
            live = ((v, -graph.d[j].size / self.byte) for j, v in keep.items() if j not in owner.pinned)
            buffers = () if copies is None else copies.buffers()
            program.weighted(owner.fixed_bytes(start if t else None) / self.byte,
                             ((budget, 1.0), *live, *buffers))
        return program

    def solve(self, budget: int, time_limit: float) -> SaveSets | None:
        self.highs.fix("budget", budget / self.byte)
        answer = self.highs.solve(time_limit, gap=GAP, nodes=NODES)
        if not answer.values:
            return None
        keep = tuple(frozenset(j for j in needed if answer.values.get(f"K_{t}_{j}", 0.0) > 0.5)
                     for t, needed in enumerate(self.needed))
        sent = frozenset(j for j in self.sendable
                         if answer.values.get(f"F_{j}", 0.0) + answer.values.get(f"L_{j}", 0.0) > 0.5)
        return SaveSets(keep, max(0.0, answer.bound) * self.second, sent)


def _closures(owner: SaveSetProgram, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Forward D nodes that each span, or a later one, may need: what it reads, and what that takes."""
    graph, made = owner.graph, owner.graph.producer
    found: list[list[int]] = []
    seen: set[int] = set()
    for start, end in reversed(spans):
        todo = [j for b in range(start, end) for j in graph.c[b].inputs]
        while todo:
            j = todo.pop()
            if j not in seen and owner.forward(j):
                seen.add(j)
                todo += graph.c[made[j]].inputs  # type: ignore[index]
        found.append(sorted(seen))
    return found[::-1]


def gradient_bytes(graph: CDGraph, pinned: frozenset[int]) -> list[int]:
    """For each backward node: gradients alive while it runs, its outputs and temporaries included.

    What an output takes over from an input that dies here is not counted; a forward value that no
    later node reads may be one.
    """
    memory = gradient_memory(graph)
    result: list[int] = []
    for b, alive, dying in zip(graph.backward, memory.during, memory.dying, strict=True):
        node = graph.c[b]
        donated = max((graph.d[j].size for j in node.donors if j not in pinned and (
            j in dying or max(graph.readers[j]) == b)), default=0)
        result.append(alive + node.overhead - donated)
    return result


def add_checkpoint_time(times: Sequence[int], node: int) -> list[int]:
    """The checkpoint times with one more, in order."""
    result = list(times)
    if node not in result:
        bisect.insort(result, node)
    return result
