"""Choose what to save at the loss, and what to run again in the backward, by an integer program on the whole
graph.

*The program* says what to save at a few checkpoint times, and gives a lower bound. A checkpoint time is the
loss, or a backward node. For each, K says which forward values are in memory when it comes; between two of
them R says which forward nodes run again. A backward node finds what it reads among what was kept or made
anew since the last one, and so does a node that runs again. Memory is limited at checkpoint times only, which
makes the program a relaxation: no schedule that runs each backward node once, in the graph's order, takes
less time than its optimum (Checkmate's program, Jain et al., MLSys 2020, section 4, has a checkpoint time per
node).

*Copies.* Where the graph has a link, values may also be sent away (`Copies`). For each forward value, F says
whether it has been copied out and is not there at the loss, L whether it is copied out otherwise, and I for
each checkpoint time whether it comes back between that time and the next. Copies out take their time between
the first run of what makes the values and the loss, copies back between the loss and the first reader; where
that is shorter, the step waits for the difference, and the program counts it. It counts the computing time
that copying takes, too. A value that is copied back may be counted as there too early, and copies in the
backward have all of the backward: so the program stays a relaxation, of schedules that run the forward in
order, too, and send forward values only. POET (Patil et al., ICML 2022) has a program for recomputation and
paging together that minimizes energy.

*The planner* makes again right before a backward node what that node misses, once, and keeps it until its
last use. The place where the simulator finds too much memory becomes a checkpoint time, and the program is
solved again. What the program sends away is copied as `rkmate.planners.offload` finds best.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rkmate.ilp.highs import Highs, Rows, Work
from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.gradients import gradient_memory
from rkmate.ir.kernels import fastest
from rkmate.ir.link import Link
from rkmate.ir.schedule import Compute, Loss
from rkmate.ir.simulate import LOSS_SCALARS
from rkmate.planners.fit import fit
from rkmate.planners.offload import may_be_sent, offload
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, infeasible, once_in, whole_step

PLACES = 12
"""Number of places of the forward, and of the backward, at which copies before or after them are counted."""

Columns = Mapping[int, int]


class Copies:
    """The columns and rows of the copies of one program."""

    def __init__(self, program: Rows, graph: CDGraph, link: Link, sendable: Sequence[bool],
                 needed: Sequence[Sequence[int]], second: float, byte: float) -> None:
        """`needed`: forward values that each span between checkpoint times, or a later span, may need.
        `second`, `byte`: the units of the program."""
        self.program, self.graph, self.link, self.second = program, graph, link, second
        self.byte = byte
        self.sent = [j for j in needed[0] if sendable[j]]
        self.F = {j: program.column(f"F_{j}", 0, 1, self._slows(j), integer=True) for j in self.sent}
        self.L = {j: program.column(f"L_{j}", 0, 1, self._slows(j)) for j in self.sent}
        self.returns = {j: program.column(f"Z_{j}", 0, 1) for j in self.sent}
        """Whether the value is away at the loss, and never made again: it comes back before it is read."""
        self.I = [{j: program.column(f"I_{t}_{j}", 0, 1, self._slows(j)) for j in here if j in self.F}
                  for t, here in enumerate(needed)]
        self.any = program.column("copies", 0, 1, integer=True)
        self.waits = tuple(program.column(name, 0, cost=1.0) for name in ("W_forward", "W_backward"))

    def back(self, t: int, j: int) -> tuple[int, ...]:
        """Return what makes a value be there in a span, except keeping it and making it again."""
        column = self.I[t].get(j)
        return () if column is None else (column,)

    def write(self, keep: Columns, again: Sequence[Columns], times: Sequence[int]) -> None:
        """Add the rows of copies. `keep`: values kept at the loss. `again`: for each span, the forward nodes
        that run in it."""
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
        """Require that the copies out of values made after some place of the forward end by the loss."""
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
        """Add a row: the step waits for copies that take longer than computing. `left`: seconds of computing
        meanwhile, without those of the terms and without the slowdown by copying."""
        weights: dict[int, float] = {}
        slower = [(v, self._slows(j)) for part in slowing for j, v in part.items() if self._slows(j)]
        for v, weight in (*terms, *slower):
            weights[v] = weights.get(v, 0.0) + weight
        self.program.weighted(-left / self.second, weights.items())

    def buffers(self) -> tuple[tuple[int, float], ...]:
        """Return the terms for the memory that copying takes at each checkpoint time."""
        size = self.link.buffer_bytes
        return ((self.any, -size / self.byte),) if size else ()

    def _out(self, j: int) -> float:
        return self.link.seconds_out(self.graph.d[j].size) / self.second

    def _slows(self, j: int) -> float:
        return self.link.computing_seconds_per_byte * self.graph.d[j].size / self.second

    def _in(self, j: int) -> float:
        return self.link.seconds_in(self.graph.d[j].size) / self.second


GAP = 0.01
"""Relative gap, of what runs again, at which a solution is good enough."""
NEAR = 1e-3, 0.05
"""A solution is good enough within this part of the step, too, and of what is known to run again at least."""
NODES = 30
"""Branch-and-bound nodes per program, at most."""
CLOSE = 2e-4
"""A schedule that takes no more than this part of its time above the bound ends the search."""
ROUND_SECONDS = 2e-5
"""Seconds, for each computation of the graph, that a program counts for besides its solve: to write it, and
to simulate the schedule."""


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

    def __init__(self, graph: CDGraph) -> None:
        self.graph = graph
        self.held = frozenset(graph.held)
        self.seconds = sum(c.time for c in graph.c)
        self.made = [-1 if i is None else i for i in graph.producer]
        """The C node of each D node; -1: what comes from outside."""
        self.reads = [tuple(j for j in c.inputs if self.forward(j)) for c in graph.c]
        """The forward values among each C node's inputs."""
        self.sendable = may_be_sent(graph)
        """The forward values that may be copied away; used where the graph has a link."""
        self._gradients = gradient_bytes(graph)
        self._programs: dict[tuple[int, ...], _Program] = {}
        self._answers: dict[tuple[int, tuple[int, ...], float], tuple[SaveSets | None, float]] = {}
        """What was solved to its end, with the work that it took."""

    def forward(self, j: int) -> bool:
        """Return whether a D node is made by a forward node: what the program chooses to keep or make anew.
        Inputs of the model and gradients are not; their bytes are `fixed_bytes`, or nobody's."""
        made = self.graph.producer[j]
        return made is not None and made < self.graph.loss

    def fixed_bytes(self, at: int | None) -> int:
        """Return memory besides forward values, at a backward node or (None) at the loss: gradients, what the
        node allocates."""
        graph, held = self.graph, self.graph.bytes(self.held)
        if at is not None:
            return held + self._gradients[at - graph.loss]
        arriving = graph.bytes(graph.output_grads) + min(LOSS_SCALARS, graph.reserve_at_loss)
        return held + max(arriving, graph.reserve_at_loss)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes that some backward node needs by itself: nothing fits in less."""
        graph = self.graph
        return max((self.fixed_bytes(b) + graph.bytes(
            j for j in graph.c[b].inputs if self.forward(j) and j not in self.held)
            for b in graph.backward), default=0)

    def solve(self, budget: int, times: Sequence[int], *, time_limit: float, work: Work | None = None,
              least: float = 0.0, enough: float = math.inf) -> SaveSets | None:
        """Return the least time for what runs again; None when nothing fits or nothing is known.

        `times`: backward nodes, in order; the loss is one, too. `work`: is counted on, and limits the solve.
        `least`: seconds of what runs again at least, as known from fewer checkpoint times. `enough`: a bound,
        in seconds, that ends the solve.
        """
        key, near = tuple(times), min(NEAR[0] * self.seconds, NEAR[1] * least)
        work = work or Work()
        known = self._answers.get((budget, key, near))
        if known is not None:
            work.spent += known[1]
            return known[0]
        if key not in self._programs:
            self._programs[key] = _Program(self, [self.graph.loss, *times])
        start, before = time.perf_counter(), work.spent
        found = self._programs[key].solve(budget, time_limit, work, near, enough)
        cut_short = work.is_over or time.perf_counter() - start >= time_limit
        if not cut_short and (found is None or found.bound < enough):
            self._answers[budget, key, near] = found, work.spent - before
        return found


class _Program:
    def __init__(self, owner: SaveSetProgram, times: Sequence[int]) -> None:
        graph = owner.graph
        self.byte = max(1, sum(d.size for d in graph.d) // 4096)
        self.second = owner.seconds / 1000 or 1.0
        ends = [*times[1:], len(graph.c)]
        self.needed = _closures(owner, list(zip(times, ends, strict=True)))
        # A restart at the root takes a third of the time, and gains nothing.
        self.highs = Highs(self._write(owner, times, ends), restarts=False)

    def _write(self, owner: SaveSetProgram, times: Sequence[int], ends: Sequence[int]) -> Rows:
        graph, reads, made = owner.graph, owner.reads, owner.made
        program = Rows()
        K = [{j: program.column(f"K_{t}_{j}", int(j in owner.held), int(t > 0 or j not in graph.forgotten),
                                integer=True) for j in needed} for t, needed in enumerate(self.needed)]
        # What runs again may do so by another kernel.
        R = [{i: program.column(f"R_{t}_{i}", 0, int(i not in graph.once), fastest(graph.c[i]) / self.second)
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
            live = ((v, -graph.d[j].size / self.byte) for j, v in keep.items() if j not in owner.held)
            buffers = () if copies is None else copies.buffers()
            program.weighted(owner.fixed_bytes(start if t else None) / self.byte,
                             ((budget, 1.0), *live, *buffers))
        return program

    def solve(self, budget: int, time_limit: float, work: Work | None, near: float, enough: float
              ) -> SaveSets | None:
        """Return a solution whose seconds are within `near` of its bound, or within `GAP`."""
        self.highs.fix("budget", budget / self.byte)
        answer = self.highs.solve(time_limit, gap=GAP, absolute_gap=max(1e-6, near / self.second),
                                  nodes=NODES, work=work, enough=enough / self.second)
        bound = max(0.0, answer.bound) * self.second
        if not answer.values:
            return SaveSets((), bound, frozenset()) if math.isfinite(bound) else None
        keep = tuple(frozenset(j for j in needed if answer.values.get(f"K_{t}_{j}", 0.0) > 0.5)
                     for t, needed in enumerate(self.needed))
        sent = frozenset(j for j in self.sendable
                         if answer.values.get(f"F_{j}", 0.0) + answer.values.get(f"L_{j}", 0.0) > 0.5)
        return SaveSets(keep, bound, sent)


def _closures(owner: SaveSetProgram, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return forward D nodes that each span, or a later one, may need: what it reads, and what that takes."""
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


def gradient_bytes(graph: CDGraph) -> list[int]:
    """Return, for each backward node, the bytes of gradients alive while it runs, including its outputs and
    temporaries.

    What an output takes over from an input that dies here is not counted; a forward value that no
    later node reads may be one.
    """
    memory, held = gradient_memory(graph), frozenset(graph.held)
    result: list[int] = []
    for b, alive, dying in zip(graph.backward, memory.during, memory.dying, strict=True):
        node = graph.c[b]
        donated = max((graph.d[j].size for j in node.donors if j not in held and (
            j in dying or max(graph.readers[j]) == b)), default=0)
        result.append(alive + node.overhead - donated)
    return result


def add_checkpoint_time(times: Sequence[int], node: int) -> list[int]:
    """Return the checkpoint times with one more, in order."""
    result = list(times)
    if node not in result:
        bisect.insort(result, node)
    return result


TIME_LIMIT = 10.0
"""Seconds of planning, where the caller names no limit."""
CHECKPOINT_TIMES = 10
"""Most checkpoint times in the backward: each adds as many variables as there are forward values."""
ROUNDS = 16
"""Programs solved for one budget, at most."""


@dataclass(frozen=True)
class SaveSet:
    """The planner. Its bound holds for every schedule that runs the backward once, in order."""

    name: str = "save-set"
    work: float = math.inf
    """Seconds that the programs of one budget may take together, as their work is counted. If they end a
    search, the result is the same on every machine; if ``time_limit`` does, it depends on the machine."""
    enough: float = math.inf
    """A bound on the seconds of a step that ends the search: a known schedule is near enough to it."""

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        whole = whole_step(problem)
        if whole.peak <= budget:
            return Outcome(whole.schedule, "ok", whole.seconds, bound=whole.seconds)
        program = save_set_program(problem)
        if budget < program.least_bytes:
            return replace(infeasible(f"a backward node alone needs {program.least_bytes:,} bytes"),
                           bound=program.seconds)
        seconds = TIME_LIMIT if time_limit is None else time_limit
        search = problem.once_of_graph((self.name, budget), lambda: _Search(problem, program, budget))
        return search.ask(seconds, self.work, self.enough - program.seconds)


_PROGRAM = "save-set program"


def save_set_program(problem: Problem) -> SaveSetProgram:
    """Return the program of a problem; it serves every budget."""
    return problem.once_of_graph(_PROGRAM, lambda: SaveSetProgram(problem.graph))


def program_of(graph: CDGraph, of_graph: dict[Hashable, object]) -> SaveSetProgram:
    """Return the program of a graph before there is a problem. `of_graph`: the memory that its problem will
    have; the program is added."""
    return once_in(of_graph, _PROGRAM, lambda: SaveSetProgram(graph))


class _Search:
    """Programs for one budget, with more and more times, then with less and less memory. Asked again for
    longer, it goes on."""

    def __init__(self, problem: Problem, program: SaveSetProgram, budget: int) -> None:
        self.problem = problem
        self.program = program
        self.budget = budget
        self.work = Work()
        self.found: list[Candidate] = []
        self.bound = 0.0
        self._times: list[int] = []
        self._memory = budget
        self._rounds = ROUNDS
        self._close = math.inf
        """The bound that shows that the fastest schedule is fast enough."""
        self._until = math.inf
        self._ended = False
        self._answers: dict[tuple[float, float, float], Outcome] = {}

    def ask(self, seconds: float, work: float, enough: float) -> Outcome:
        """Return what is found. `seconds`: of the clock, from now on. `work`: seconds of all programs of this
        budget, as they are counted. `enough`: a bound, in seconds of what runs again, that ends the
        search."""
        key = seconds, work, enough
        if key not in self._answers:
            self._until = time.perf_counter() + seconds
            self.work.limit = work
            while not (self._ended or self._is_late or self.bound >= min(enough, self._close)):
                self._ended = not self._round(enough)
            found = best(self.found, self.budget)
            if found.schedule is None:
                found = replace(found, note="what is kept leaves no room for what is made again")
            self._answers[key] = replace(
                found, bound=self.program.seconds + self.bound, others=tuple(self.found),
                cut_short=not self._ended and self._is_late, worked=self.work.spent)
        return self._answers[key]

    @property
    def _is_late(self) -> bool:
        return self.work.is_over or time.perf_counter() >= self._until

    def _round(self, enough: float) -> bool:
        """Solve one program; returns whether there is another one to solve. One that is cut short is solved
        again, when there is more time."""
        if not self._rounds or self._memory <= 0:
            return False
        self.work.spent += ROUND_SECONDS * len(self.problem.graph.c)
        kept = self.program.solve(
            self._memory, self._times, time_limit=self._until - time.perf_counter(), work=self.work,
            least=self.bound, enough=min(enough, self._close))
        if kept is not None and self._memory == self.budget:
            self.bound = max(self.bound, kept.bound)
        if kept is None or not kept.keep:
            return self._is_late or self.bound >= enough
        found, at = self._expand(kept, self._times)
        self.found.append(found)
        late = self._is_late
        self._fit(found)
        if late:
            return True
        if found.peak <= self.budget:
            return False
        self._rounds -= 1
        more = self._times if at is None else add_checkpoint_time(self._times, at)
        if more == self._times or len(more) > CHECKPOINT_TIMES:
            # The peak stands in what is made again, which the program does not see.
            self._memory -= min(max(found.peak - self.budget, self.budget // 200), self.budget // 50)
        else:
            self._times = more
        return True

    def _fit(self, found: Candidate) -> None:
        """Make a schedule fit; the search ends once its bound shows that what fits is fast enough."""
        if found.schedule.copied:
            return
        fitted = fit(self.problem, found.schedule, self.budget)
        self.work.spent += ROUND_SECONDS * len(self.problem.graph.c) * fitted.simulations
        if fitted.candidate is not None:
            self.found.append(fitted.candidate)
            self._close = min(self._close, fitted.candidate.seconds / (1 + CLOSE) - self.program.seconds)

    def _expand(self, kept: SaveSets, times: Sequence[int]) -> tuple[Candidate, int | None]:
        """Return the schedule, and the backward node before which, or at which, its peak stands."""
        graph = self.problem.graph
        order = list(range(graph.loss))
        order += again(graph, kept, times)
        schedule = self.problem.schedule(order, graph.loss)
        if graph.link is not None:
            sent = offload(graph, schedule, self.budget, until=self._until)
            if sent is not None:
                return Candidate(sent.schedule, sent.simulation.peak, sent.simulation.seconds), None
        result = self.problem.simulate(schedule)
        found = Candidate(schedule, result.peak, result.seconds)
        steps, place = schedule.steps, result.peak_at
        if any(isinstance(s, Loss) for s in steps[place + 1:]):
            return found, None
        return found, next((s.c for s in steps[place:] if isinstance(s, Compute)
                            and s.c >= graph.loss), None)


def again(graph: CDGraph, kept: SaveSets, times: Sequence[int]) -> list[int]:
    """Return the backward nodes in order, each after the forward nodes that it needs to run again."""
    always = kept.sent.union(graph.held)      # what is sent away is read as if it had stayed
    there = set(kept.keep[0] | always)
    order: list[int] = []

    def make(wanted: Iterable[int]) -> None:
        for i in sorted(missing_nodes(graph, wanted, there)):
            order.append(i)
            there.update(graph.c[i].outputs)

    edges = iter(zip(times, kept.keep[1:], strict=True))
    edge, keep = next(edges, (None, frozenset[int]()))
    for b in range(graph.loss, len(graph.c)):
        if b == edge:
            make(keep)
            there &= keep | always
            edge, keep = next(edges, (None, frozenset[int]()))
        make(graph.c[b].inputs)
        order.append(b)
    return order
