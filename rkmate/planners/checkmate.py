"""Checkmate on a whole graph: optimal rematerialization by integer programming, with a bound, and roundings.

Jain et al., MLSys 2020. `CheckmatePlanner` solves the program of sections 4 and 5.2: the optimum over all
schedules that run first runs in the graph's order and forward nodes again at any stage, each at most once a
stage. Above `SMALL` nodes forward nodes are run again after the loss only: otherwise the program, quadratic
in the number of nodes, is out of reach.

`CheckmateRounded` rounds the linear relaxation in two phases (section 5). Phase one rounds S, which values
stay from stage to stage, at thresholds. Phase two finds the fewest runs R that make it executable. A rounded
schedule may need more memory than its relaxation had, so relaxations at several budgets are rounded and the
simulator picks what fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rkmate.errors import ScheduleError
from rkmate.ilp.highs import Highs, Solution, Status
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.recompute import missing_nodes
from rkmate.ir.schedule import Schedule, from_order
from rkmate.ir.simulate import simulate
from rkmate.planners.checkmate_model import CheckmateModel, Recompute, rerunnable
from rkmate.planners.protocol import (
    Candidate,
    Outcome,
    Planner,
    Problem,
    best,
    infeasible,
    judged,
    whole_step,
)

SMALL = 48
"""Up to this many C nodes, forward nodes may run again before the loss, too."""
MOST_DECISIONS = 60_000
"""More possible recomputations than this are not handed to the solver: building the program alone
would take a minute."""
TIME_LIMIT = 30.0
"""Seconds of planning, where the caller names no limit."""


@dataclass(frozen=True)
class CheckmateSolution:
    """Result of one program."""

    schedule: Schedule | None
    status: Status
    seconds: float
    """Time of all computations; inf without a schedule."""
    bound: float
    """Lower bound of it, in seconds."""

    @property
    def gap(self) -> float:
        """How far the schedule can be from the optimum, relative to its own time."""
        if not math.isfinite(self.seconds):
            return math.inf
        return max(0.0, self.seconds - self.bound) / self.seconds if self.seconds else 0.0


class Checkmate:
    """The program of one graph, for any budget in bytes."""

    def __init__(self, graph: CDGraph, recompute: Recompute = "any", pinned: Iterable[int] = (),
                 reserve_at_loss: int = 0) -> None:
        self.model = CheckmateModel(graph, recompute, pinned, reserve_at_loss)
        self.highs = Highs(self.model.program)

    def solve(self, budget: int, *, time_limit: float = TIME_LIMIT, gap: float = 0.0,
              known: Schedule | None = None) -> CheckmateSolution:
        """Return the fastest schedule within a budget. Raises `SolverError` when HiGHS itself fails.

        `known`: a schedule within the budget to start from.
        """
        model = self.model
        start = time.perf_counter()
        values = model.start(known) if known is not None else None
        bound: float | None = None
        margin = 0.0
        while True:
            self.highs.fix("budget", budget * (1 - margin) / model.byte)
            left = time_limit - (time.perf_counter() - start)
            answer = self.highs.solve(left, gap=gap, start=values)
            status = answer.status
            if bound is None:       # of the whole budget; a reduced one's proves nothing
                bound = model.base_seconds + max(0.0, answer.bound) * model.second
            if status in (Status.INFEASIBLE, Status.TIMED_OUT):
                return CheckmateSolution(None, Status.TIMED_OUT if margin else status, math.inf, bound)
            order, loss_at = model.order(answer.values)
            schedule = from_order(model.graph, order, loss_at, model.pinned)
            result = simulate(model.graph, schedule, pinned=model.pinned,
                              reserve_at_loss=model.reserve)
            if result.peak <= budget:
                if margin and result.seconds > bound * (1 + max(gap, 1e-9)):
                    status = Status.FEASIBLE
                return CheckmateSolution(schedule, status, result.seconds, bound)
            if left <= 0:
                return CheckmateSolution(None, Status.TIMED_OUT, math.inf, bound)
            # The solver's tolerances let some bytes too many through.
            if margin > 1e-3:
                raise ScheduleError(f"the program's schedule needs {result.peak} bytes, the budget "
                                    f"is {budget}")
            margin = margin * 10 or 1e-7

    def relaxed(self, budget: int, *, time_limit: float = TIME_LIMIT) -> Solution:
        """Return the linear relaxation within a budget, in the model's units."""
        self.highs.fix("budget", budget / self.model.byte)
        return self.highs.solve(time_limit, relax=True)


def plain_graph(reads: Iterable[Iterable[int]], times: Iterable[float],
                sizes: Iterable[int]) -> CDGraph:
    """Return a DAG of nodes with one value each, all of which may run again (Checkmate, section 4.1).

    `reads`: for each node, in topological order, the nodes whose values it reads.
    """
    names = list(reads)
    return CDGraph(
        tuple(DNode(f"v{k}", size) for k, size in enumerate(sizes)),
        tuple(CNode(f"v{k}", "forward", tuple(inputs), (k,), t)
              for k, (inputs, t) in enumerate(zip(names, times, strict=True))),
        len(names)).verify()


def recompute_of(graph: CDGraph) -> Recompute:
    """Return when forward nodes of a graph of this size may run again."""
    return "any" if len(graph.c) <= SMALL else "after-loss"


def program_of(problem: Problem) -> Checkmate:
    """Return the program of a captured model; one program serves every budget."""
    return problem.once("checkmate program", lambda: Checkmate(
        problem.graph, recompute_of(problem.graph), problem.pinned, problem.reserve_at_loss))


@dataclass(frozen=True)
class CheckmatePlanner:
    """The integer program as a planner; bound and gap stand in the outcome."""

    name: str = "checkmate"
    starts: Sequence[Planner] = ()
    """Quick planners whose schedules the solver starts from."""

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        start = time.perf_counter()
        limit = TIME_LIMIT if time_limit is None else time_limit
        starts = [p.plan(problem, budget, time_limit=limit / 4) for p in self.starts]
        quick = min(starts, key=lambda outcome: outcome.seconds, default=infeasible())
        least = sum(c.time for c in problem.graph.c)
        if quick.schedule is not None and quick.seconds <= least * (1 + 1e-12):
            return replace(quick, bound=least, note="nothing is recomputed")
        decisions = problem.once("decisions", lambda: sum(map(len, rerunnable(
            problem.graph, recompute_of(problem.graph)))))
        if decisions > MOST_DECISIONS:
            return Outcome(None, "timeout", math.inf, note=(
                f"not tried: {decisions:,} possible recomputations; the program takes up to "
                f"{MOST_DECISIONS:,}"))
        program = program_of(problem)
        left = limit - (time.perf_counter() - start)
        solution = program.solve(budget, time_limit=left, known=quick.schedule)
        restricted = recompute_of(problem.graph) == "after-loss"
        kind = "recomputation after the loss only; " if restricted else ""
        if quick.schedule is not None and not solution.seconds <= quick.seconds:
            # The solver ran out of time, or the schedule is not of the program's kind.
            return Outcome(quick.schedule, "ok", quick.seconds, min(solution.bound, quick.seconds),
                           f"{kind}{solution.status.value}; the schedule that it started from is better")
        if solution.schedule is None:
            if solution.status is Status.INFEASIBLE:
                return Outcome(None, "infeasible", math.inf, math.inf, (
                    f"{kind}proven within schedules that run a node at most once a stage"))
            return Outcome(None, "timeout", math.inf, solution.bound,
                           f"{kind}nothing found within {limit:g} s")
        return Outcome(solution.schedule, "ok", solution.seconds, solution.bound,
                       f"{kind}{solution.status.value}, gap {solution.gap:.2%}")


THRESHOLDS = (0.5, 0.25, 0.75, 0.05, 0.95)
RELAXED_BUDGETS = (0.95, 0.85, 0.7, 0.62, 0.55, 0.45, 0.37, 0.3, 0.2, 0.14)
"""Budgets of the relaxations, as fractions of the peak without recomputation."""


def round_relaxation(model: CheckmateModel, values: Mapping[str, float],
                     threshold: float) -> tuple[list[int], int]:
    """Return the order of C nodes that keeps what the relaxation keeps to at least `threshold`."""
    graph = model.graph
    n = len(graph.c)
    stay = [{j for j, v in stage.items() if values.get(v.name, 0.0) >= threshold}
            for stage in model.S] + [set()]
    there: set[int] = set()
    order: list[int] = []
    loss_at = n
    for t in range(n):
        if t == graph.loss:
            order += sorted(missing_nodes(graph, graph.outputs, there | model.pinned))
            there |= {j for i in order for j in graph.c[i].outputs if j in graph.outputs}
            loss_at = len(order)
        node = graph.c[t]
        made_here = set(node.outputs)
        wanted = (*node.inputs, *sorted(stay[t + 1] - made_here))
        before = sorted(missing_nodes(graph, wanted, there | model.pinned, {t}))
        made = {j for i in before for j in graph.c[i].outputs} | made_here
        order += [*before, t]
        there = {j for j in there | made if j in stay[t + 1]}
    return order, loss_at if graph.loss < n else len(order)


@dataclass
class Roundings:
    """Relaxations of one problem that were solved."""

    found: dict[float, tuple[Candidate, ...]] = field(default_factory=dict)
    """Schedules by the part of the whole step's peak that they were rounded to."""
    infeasible: float = 0.0
    """The largest part that is known to have no solution."""
    given_up: float = 0.0
    """The longest time, in seconds, in which not even one could be solved."""


@dataclass(frozen=True)
class CheckmateRounded:
    """Roundings of relaxations at a fixed set of budgets; the fastest that fits is taken.

    If the time is over before all of them are solved, the next call goes on with the others. The one
    nearest to the budget comes first.
    """

    name: str = "checkmate-lp"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`. No bound is known: the relaxations are of
        other budgets."""
        graph = problem.graph
        limit = TIME_LIMIT if time_limit is None else time_limit
        whole = replace(whole_step(problem), note="nothing recomputed")
        if whole.peak <= budget:
            return best((whole,), budget)
        state = problem.once(self.name, Roundings)
        decisions = problem.once("decisions", lambda: sum(map(len, rerunnable(
            graph, recompute_of(graph)))))
        if decisions > MOST_DECISIONS:
            return Outcome(None, "timeout", float("inf"), note=(
                f"not tried: {decisions:,} possible recomputations; the relaxation takes up to "
                f"{MOST_DECISIONS:,}"))
        self._solve(problem, state, budget, limit)
        left = sum(part > state.infeasible and part not in state.found for part in RELAXED_BUDGETS)
        note = f"{left} of {len(RELAXED_BUDGETS)} relaxations not solved in {limit:g} s" if left else ""
        outcome = best((c for found in state.found.values() for c in found), budget, note)
        if outcome.schedule is None and left:
            return Outcome(None, "timeout", float("inf"), note=note)
        return outcome

    def _solve(self, problem: Problem, state: Roundings, budget: int, limit: float) -> None:
        """Solve and round what is still to be done, until the time is over."""
        start = time.perf_counter()
        if limit <= state.given_up:
            return                       # they are all of one size: another one will not do better
        program: Checkmate = program_of(problem)
        top = whole_step(problem).peak
        before = len(state.found), state.infeasible
        for part in sorted(RELAXED_BUDGETS, key=lambda p: abs(p * top - budget)):
            left = limit - (time.perf_counter() - start)
            if left <= 0:
                return
            if part in state.found or part <= state.infeasible:
                continue
            answer = program.relaxed(int(top * part), time_limit=left)
            if answer.status is Status.INFEASIBLE:
                state.infeasible = part
                continue
            if not answer.values:
                if (len(state.found), state.infeasible) == before:
                    state.given_up = limit
                return
            state.found[part] = tuple(
                judged(problem, *round_relaxation(program.model, answer.values, threshold),
                       f"relaxation at {part:.0%}, rounded at {threshold}")
                for threshold in THRESHOLDS)
