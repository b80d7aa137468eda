"""What to save at the loss, and what to run again on the way back: each forward node once more.

The save-set program says which values are in memory at the loss and at a few checkpoint times of the
backward; what a backward node misses is made again right before it, and stays until its last use. The
place where the simulator finds too much memory becomes a checkpoint time, and the program is solved again.
Where the graph has a link, what the program sends away is copied as `rkmate.planners.offload` finds best.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, Loss
from rkmate.planners.offload import offload
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, infeasible, whole_step
from rkmate.planners.save_set_program import SaveSetProgram, SaveSets, add_checkpoint_time

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

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        whole = whole_step(problem)
        if whole.peak <= budget:
            return Outcome(whole.schedule, "ok", whole.seconds, bound=whole.seconds)
        program = save_set_program(problem)
        if budget < program.least_bytes:
            return replace(infeasible(f"a backward node alone needs {program.least_bytes:,} bytes"),
                           bound=program.seconds)
        search = _Search(problem, program, budget, TIME_LIMIT if time_limit is None else time_limit)
        search.run()
        found = best(search.found, budget)
        if found.schedule is None:
            found = replace(found, note="what is kept leaves no room for what is made again")
        return replace(found, bound=program.seconds + search.bound, others=tuple(search.found))


def save_set_program(problem: Problem) -> SaveSetProgram:
    """The program of a problem; it serves every budget."""
    return problem.once("save-set program", lambda: SaveSetProgram(
        problem.graph, problem.pinned, problem.reserve_at_loss))


class _Search:
    """Programs for one budget, with more and more times, then with less and less memory."""

    def __init__(self, problem: Problem, program: SaveSetProgram, budget: int,
                 seconds: float) -> None:
        self.problem = problem
        self.program = program
        self.budget = budget
        self.found: list[Candidate] = []
        self.until = time.perf_counter() + seconds
        self.bound = 0.0

    def run(self) -> None:
        times: list[int] = []
        memory = self.budget
        for _ in range(ROUNDS):
            left = self.until - time.perf_counter()
            if left <= 0 or memory <= 0:
                return
            kept = self.program.solve(memory, times, time_limit=left)
            if kept is None:
                return
            if memory == self.budget:
                self.bound = max(self.bound, kept.bound)
            found, at = self._expand(kept, times)
            self.found.append(found)
            if found.peak <= self.budget:
                return
            more = times if at is None else add_checkpoint_time(times, at)
            if more == times or len(more) > CHECKPOINT_TIMES:
                # The peak stands in what is made again, which the program does not see.
                memory -= min(max(found.peak - self.budget, self.budget // 200), self.budget // 50)
            else:
                times = more

    def _expand(self, kept: SaveSets, times: Sequence[int]) -> tuple[Candidate, int | None]:
        """The schedule, and the backward node before which, or at which, its peak stands."""
        graph = self.problem.graph
        order = list(range(graph.loss))
        order += again(graph, kept, times, self.problem.pinned)
        schedule = self.problem.schedule(order, graph.loss)
        if graph.link is not None:
            sent = offload(graph, schedule, self.budget, pinned=self.problem.pinned,
                           reserve_at_loss=self.problem.reserve_at_loss, until=self.until)
            if sent is not None:
                return Candidate(sent.schedule, sent.simulation.peak, sent.simulation.seconds), None
        result = self.problem.simulate(schedule)
        found = Candidate(schedule, result.peak, result.seconds)
        steps, place = schedule.steps, result.peak_at
        if any(isinstance(s, Loss) for s in steps[place + 1:]):
            return found, None
        return found, next((s.c for s in steps[place:] if isinstance(s, Compute)
                            and s.c >= graph.loss), None)


def again(graph: CDGraph, kept: SaveSets, times: Sequence[int], pinned: Iterable[int]) -> list[int]:
    """The backward nodes in order, each after the forward nodes that it needs to run again."""
    pinned = frozenset(pinned)
    always = kept.sent | pinned      # what is sent away is read as if it had stayed
    there = set(kept.keep[0] | always)
    order: list[int] = []

    def make(wanted: Iterable[int]) -> None:
        todo, runs = list(wanted), set[int]()
        while todo:
            j = todo.pop()
            made = graph.producer[j]
            if made is not None and made < graph.loss and j not in there and made not in runs:
                runs.add(made)
                todo += graph.c[made].inputs
        for i in sorted(runs):
            order.append(i)
            there.update(graph.c[i].outputs)

    edges = iter(zip(times, kept.keep[1:], strict=True))
    edge, keep = next(edges, (None, frozenset[int]()))
    for b in range(graph.loss, len(graph.c)):
        if b == edge:
            make(sorted(keep))
            there &= keep | always
            edge, keep = next(edges, (None, frozenset[int]()))
        make(graph.c[b].inputs)
        order.append(b)
    return order
