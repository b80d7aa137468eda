"""The third choice of the save-set program: what is not kept and not made again has been sent away.

For each forward value, F says whether it has been copied out and is not there at the loss, L whether it is
copied out else, and I for each checkpoint time whether it comes back between it and the next. Copies out take
their time between the first run of what makes them and the loss, copies back between the loss and their first
reader; where that is shorter, the difference is waited for, and counted. So is the computing time that
copying takes. What is copied back may be counted as there too early, and copies in the backward have all
of it: so the program stays a relaxation, of schedules that run the forward in order, too, and send forward
values only. POET (Patil et al., ICML 2022) has a program for recomputation and paging together, too, which
minimizes energy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rkmate.ilp.rows import Rows
from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Link

PLACES = 12
"""At how many places of the forward, and of the backward, what is copied before or after it is counted."""

Columns = Mapping[int, int]


class Copies:
    """The columns and rows of the copies of one program."""

    def __init__(self, program: Rows, graph: CDGraph, link: Link, sendable: Sequence[bool],
                 needed: Sequence[Sequence[int]], second: float, byte: float) -> None:
        """`needed`: forward values that each span between checkpoint times, or a later one, may need.
        `second`, `byte`: the units of the program."""
        self.program, self.graph, self.link, self.second = program, graph, link, second
        self.byte = byte
        self.sent = [j for j in needed[0] if sendable[j]]
        self.F = {j: program.column(f"F_{j}", 0, 1, self._slows(j), integer=True) for j in self.sent}
        self.L = {j: program.column(f"L_{j}", 0, 1, self._slows(j)) for j in self.sent}
        self.returns = {j: program.column(f"Z_{j}", 0, 1) for j in self.sent}
        """Whether it is away at the loss, and never made again: then it comes back before it is read."""
        self.I = [{j: program.column(f"I_{t}_{j}", 0, 1, self._slows(j)) for j in here if j in self.F}
                  for t, here in enumerate(needed)]
        self.any = program.column("copies", 0, 1, integer=True)
        self.waits = tuple(program.column(name, 0, cost=1.0) for name in ("W_forward", "W_backward"))

    def back(self, t: int, j: int) -> tuple[int, ...]:
        """What makes a value be there in a span beside keeping it and making it again."""
        column = self.I[t].get(j)
        return () if column is None else (column,)

    def write(self, keep: Columns, again: Sequence[Columns], times: Sequence[int]) -> None:
        """The rows. `keep`: at the loss. `again`: per span, the forward nodes that run in it."""
        program, graph, made = self.program, self.graph, self.graph.producer
        runs = {j: [v for span in again if (v := span.get(made[j])) is not None]  # type: ignore[arg-type]
                for j in self.sent}
        for j in self.sent:
            program.at_least(0, (self.any,), (self.F[j],))
            program.at_least(0, (self.any,), (self.L[j],))
            program.at_least(0, (keep[j], *runs[j]), (self.L[j],))
            program.weighted(-1.0, ((self.F[j], -1.0), (keep[j], -1.0)))
            program.at_least(0, (self.returns[j], *runs[j]), (self.F[j],))
        for span in self.I:
            for j, column in span.items():
                program.at_least(0, (self.F[j], self.L[j]), (column,))
        if self.link.most_bytes is not None:
            program.weighted(-self.link.most_bytes / self.byte, (
                (v, -graph.d[j].size / self.byte) for part in (self.F, self.L) for j, v in part.items()))
        self._forward()
        self._backward(again, times)

    def _forward(self) -> None:
        """Copies out of what is made from some place of the forward on end by the loss."""
        graph = self.graph
        ended = np.cumsum([c.time for c in graph.c])
        total = float(ended[graph.loss - 1]) if graph.loss else 0.0
        by_node = sorted(self.sent, key=lambda j: graph.producer[j] or 0)
        for start in sorted({len(by_node) * k // PLACES for k in range(PLACES)}):
            rest = by_node[start:]
            if rest:
                left = total - float(ended[graph.producer[rest[0]] or 0])
                self._wait(left, ((self.waits[0], 1.0), *((self.F[j], -self._out(j)) for j in rest)),
                           (self.F, self.L))

    def _backward(self, again: Sequence[Columns], times: Sequence[int]) -> None:
        graph, later = self.graph, (self.L, *self.I)
        began = np.concatenate([[0.0], np.cumsum([graph.c[b].time for b in graph.backward])])
        whole = float(began[-1])

        def extra(spans: Sequence[Columns]) -> list[tuple[int, float]]:
            return [(v, graph.c[i].time / self.second) for span in spans for i, v in span.items()]

        # All copies that begin after a checkpoint time end before the step does.
        for t, start in enumerate(times):
            self._wait(whole - float(began[start - graph.loss]), (
                (self.waits[1], 1.0), *extra(again[t:]),
                *((v, -self._in(j)) for span in self.I[t:] for j, v in span.items())), later)
        out = [(v, -self._out(j)) for part in (self.F, self.L) for j, v in part.items()]
        self._wait(sum(c.time for c in graph.c), (*((w, 1.0) for w in self.waits), *extra(again), *out),
                   (self.F, *later))
        # What is not there at the loss, and is never made again, comes back before its first reader runs.
        first = {j: next((b for b in graph.readers[j] if b >= graph.loss), None) for j in self.sent}
        by_reader = sorted((b, j) for j, b in first.items() if b is not None)
        for stop in sorted({len(by_reader) * k // PLACES for k in range(1, PLACES + 1)}):
            if not stop:
                continue
            last = by_reader[stop - 1][0]
            spans = [span for span, start in zip(again, times, strict=True) if start <= last]
            self._wait(float(began[last - graph.loss]), (
                (self.waits[1], 1.0), *extra(spans),
                *((self.returns[j], -self._in(j)) for _, j in by_reader[:stop])), later)

    def _wait(self, left: float, terms: Iterable[tuple[int, float]], slowing: Sequence[Columns]) -> None:
        """A row: copies that take longer than computing are waited for. `left`: seconds of computing
        meanwhile, beside what is in the terms, and what copying slows it by."""
        weights: dict[int, float] = {}
        slower = [(v, self._slows(j)) for part in slowing for j, v in part.items() if self._slows(j)]
        for v, weight in (*terms, *slower):
            weights[v] = weights.get(v, 0.0) + weight
        self.program.weighted(-left / self.second, weights.items())

    def buffers(self) -> tuple[tuple[int, float], ...]:
        """What copying takes of the memory at each checkpoint time."""
        size = self.link.buffer_bytes
        return ((self.any, -size / self.byte),) if size else ()

    def _out(self, j: int) -> float:
        return self.link.seconds_out(self.graph.d[j].size) / self.second

    def _slows(self, j: int) -> float:
        return self.link.computing_seconds_per_byte * self.graph.d[j].size / self.second

    def _in(self, j: int) -> float:
        return self.link.seconds_in(self.graph.d[j].size) / self.second
