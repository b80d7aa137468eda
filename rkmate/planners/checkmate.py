"""Checkmate on a whole graph: optimal rematerialization by integer programming, with a bound, and roundings.

Jain et al., MLSys 2020. `CheckmateModel` is the program of section 4. Stage t ends with the first run of C
node t; before it, earlier forward nodes may run again, each at most once, in the graph's order. The
constraints carry the paper's equation names where it has them. What the paper leaves out and a captured
graph has: several outputs of one node, temporary memory, outputs that take a dying input's place, the loss
between forward and backward, gradients that run once. Backward nodes are never run again. Only R is integer:
with R decided, the retention of a value is forced to 1 from where it is made (or the stage's start) to where
it is read, and may be 0 elsewhere.

`CheckmatePlanner` solves it (sections 4 and 5.2): the optimum over all schedules that run first runs in the
graph's order and forward nodes again at any stage. Above `SMALL` nodes forward nodes are run again after the
loss only: otherwise the program, quadratic in the number of nodes, is out of reach.

`CheckmateRounded` rounds the linear relaxation in two phases (section 5). Phase one rounds S, which values
stay from stage to stage, at thresholds. Phase two finds the fewest runs R that make it executable. A rounded
schedule may need more memory than its relaxation had, so relaxations at several budgets are rounded and the
simulator picks what fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from rkmate.errors import ScheduleError
from rkmate.ilp.highs import Highs, Rows, Solution, Status
from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.schedule import Schedule, from_order
from rkmate.ir.simulate import LOSS_SCALARS, simulate
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

# -- The program -----------------------------------------------------------------------------------

Recompute = Literal["any", "after-loss"]

UNITS = 1e5
"""Memory is counted in this fraction of the graph's total, times in the same of the step's."""


def rerunnable(graph: CDGraph, recompute: Recompute) -> list[list[int]]:
    """Return, for each stage, the C nodes that may run again in it: forward nodes before it that a first run
    from this stage on depends on."""
    n = len(graph.c)
    ancestors: set[int] = set()
    result: list[list[int]] = [[] for _ in range(n)]
    for t in range(n - 1, -1, -1):
        ancestors |= missing_nodes(graph, graph.c[t].inputs, known=ancestors)
        if recompute == "any" or t >= graph.loss:
            result[t] = sorted(i for i in ancestors if i < t)
    return result


class Variable(NamedTuple):
    """A variable of the program."""

    name: str
    column: int


Value = Variable | int
"""A variable, or what it would be where nothing is to be decided: 0 or 1."""
Term = tuple[float, Value]
"""A weight, and what it multiplies."""


class CheckmateModel:
    """The program; the budget is a variable with equal bounds, so one model serves all budgets."""

    def __init__(self, graph: CDGraph, recompute: Recompute = "any") -> None:
        self.graph = graph
        self._loss_keeps = min(graph.reserve_at_loss, LOSS_SCALARS)
        self.held = frozenset(graph.held)
        n = len(graph.c)
        self.base_seconds = sum(c.time for c in graph.c)
        self.second = (self.base_seconds or 1.0) / UNITS
        self.byte = max(1.0, sum(d.size for d in graph.d) / UNITS)
        self.rerunnable = rerunnable(graph, recompute)
        self.program = Rows()
        # (1a) the objective: time of everything that runs again.
        self.R = {(t, i): self._variable(f"R_{t}_{i}", cost=graph.c[i].time / self.second, integer=True)
                  for t in range(n) for i in self.rerunnable[t]}
        self._fixed = self._gradients()
        self._free = [made is not None and made < graph.loss and j not in self.held
                      and j not in graph.inputs for j, made in enumerate(graph.producer)]
        self._now: dict[int, Value] = {}      # retention of each value, so far
        self._used: Value = 0                 # U of the paper, so far
        self.S: list[dict[int, Variable]] = []
        """For each stage, which values are there at its start, as variables."""
        self._last_use = self._last_uses()
        for t in range(n):
            self._stage(t)
        if graph.loss == n:
            self._loss()

    def _gradients(self) -> list[int]:
        """Return bytes at each stage's start that no decision changes: gradients, held values, and what the
        loss keeps."""
        graph, n = self.graph, len(self.graph.c)
        result = [0] * graph.loss + [self._loss_keeps] * (n + 1 - graph.loss)
        for j, node in enumerate(graph.d):
            made = graph.producer[j]
            if j in graph.output_grads:
                first, last = graph.loss, max(graph.readers[j], default=graph.loss - 1)
            elif made is None:
                continue
            elif made >= graph.loss:
                first, last = made + 1, max([*graph.readers[j], graph.releases.get(j, -1)], default=-1)
            elif j in self.held:
                first, last = made + 1, n
            else:
                continue
            if j in graph.input_grads or j in self.held:
                last = n
            for t in range(first, min(last, n) + 1):
                result[t] += node.size
        return result

    def _is_gradient(self, j: int) -> bool:
        made = self.graph.producer[j]
        return j in self.graph.output_grads if made is None else made >= self.graph.loss

    def _last_uses(self) -> list[int]:
        """Return the last stage in which a value can be read."""
        result = [-1] * len(self.graph.d)
        for t, nodes in enumerate(self.rerunnable):
            for i in (*nodes, t):
                for j in self.graph.c[i].inputs:
                    result[j] = t
        return result

    @cached_property
    def budget(self) -> Variable:
        """The variable that each solve fixes: the budget."""
        top = sum(d.size for d in self.graph.d) * 2 + sum(c.overhead for c in self.graph.c)
        return self._variable("budget", top / self.byte + 1)

    def _variable(self, name: str, upper: float = 1, cost: float = 0.0, *, integer: bool = False) -> Variable:
        return Variable(name, self.program.column(name, 0, upper, cost, integer=integer))

    def _require(self, *terms: Term, least: float = -math.inf) -> None:
        """Add a row: the sum of the terms is at most 0, and at least `least`."""
        known = sum(weight * value for weight, value in terms if not isinstance(value, Variable))
        self.program.weighted(least - known, [(value.column, weight) for weight, value in terms
                                              if isinstance(value, Variable)], -known)

    def _loss(self) -> None:
        """Require the outputs when the loss is computed, and add their gradients."""
        graph = self.graph
        for j in graph.outputs:
            if self._free[j]:
                self._require((1, 1), (-1, self._now[j]))
        extra = max(graph.bytes(graph.output_grads) + self._loss_keeps, graph.reserve_at_loss)
        held = sum(graph.d[j].size for j in self.held
                   if (made := graph.producer[j]) is not None and made < graph.loss)
        self._require((1, self._used), ((extra + held) / self.byte, 1), (-1, self.budget))
        change: list[Term] = []
        for j in graph.outputs:
            if self._free[j]:
                before = self._now[j]
                after: Value = 0
                if self._last_use[j] >= graph.loss:
                    after = self._variable(f"S_loss_{j}")
                    self._require((1, after), (-1, before))
                self._now[j] = after
                change += self._change(j, before, after)
        self._use(change, "loss")

    def _stage(self, t: int) -> None:
        graph = self.graph
        if t == graph.loss:
            self._loss()
        self.S.append({j: v for j, v in self._now.items() if isinstance(v, Variable)})
        steps = [*self.rerunnable[t], t]
        uses: dict[int, list[int]] = {}
        for i in steps:
            for j in dict.fromkeys((*graph.c[i].inputs, *graph.c[i].outputs)):
                if self._free[j]:
                    uses.setdefault(j, []).append(i)
        changed = False
        for i in steps:
            node = graph.c[i]
            runs: Value = 1 if i == t else self.R[t, i]
            # (1b) inputs are there when a node runs.
            for j in node.inputs:
                if self._free[j]:
                    self._require((1, runs), (-1, self._now.get(j, 0)))
            change: list[Term] = []
            after_of: dict[int, Value] = {}
            for j in dict.fromkeys((*node.inputs, *node.outputs)):
                if not self._free[j]:
                    continue
                before = self._now.get(j, 0)
                after: Value = 0
                needed = (self._last_use[j] > t or (j in graph.outputs and t < graph.loss)
                          or uses[j][-1] != i)
                if needed:
                    after = self._variable(f"S_{t}_{j}_{i}")
                    # (1c) a value stays, or its node runs.
                    self._require((1, after), (-1, before), (-int(j in node.outputs), runs))
                self._now[j] = after_of[j] = after
                change += self._change(j, before, after)
            # (1d, 7) memory during the step: what is there, its outputs, its temporaries.
            own = (graph.bytes(node.outputs) + node.overhead) / self.byte
            if own or changed:
                self._require((1, self._used), (own, runs), (self._fixed[t] / self.byte, 1),
                              *self._overwritten(i, t, runs, after_of), (-1, self.budget))
            if change:
                self._use(change, f"{t}_{i}")
                changed = True

    def _change(self, j: int, before: Value, after: Value) -> list[Term]:
        """Return the terms by which a value changes U."""
        size = self.graph.d[j].size / self.byte
        return [(sign * size, value) for sign, value in ((1, after), (-1, before))
                if size and isinstance(value, Variable)]

    def _use(self, change: Sequence[Term], name: str) -> None:
        """Apply equation (5) with U as a separate variable; otherwise every row would name every value."""
        if change:
            used = self._variable(f"U_{name}", math.inf)
            self._require((1, self._used), *change, (-1, used), least=0)
            self._used = used

    def _overwritten(self, i: int, t: int, runs: Value, after: Mapping[int, Value]) -> list[Term]:
        """Return memory that a run of node i in stage t does not take, because its output takes the storage
        of an input that dies with it."""
        graph = self.graph
        node = graph.c[i]
        saving: list[Term] = []
        chosen: list[Term] = []
        for j in node.donors:
            if self._free[j]:
                dies = after.get(j, 0)
            elif (self._is_gradient(j) and j not in graph.input_grads
                    and graph.releases.get(j, -1) <= t and max(graph.readers[j]) == t):
                dies = 0
            else:
                continue
            taken = self._variable(f"W_{t}_{i}_{j}")
            self._require((1, taken), (-1, runs))
            self._require((1, taken), (1, dies), (-1, 1))
            saving.append((-graph.d[j].size / self.byte, taken))
            chosen.append((1, taken))
        if len(chosen) > 1:
            self._require(*chosen, (-1, 1))
        return saving

    def order(self, values: Mapping[str, float]) -> tuple[list[int], int]:
        """Return the order of C nodes that a solution stands for, and where the loss stands in it."""
        order: list[int] = []
        loss_at = 0
        for t in range(len(self.graph.c)):
            if t == self.graph.loss:
                loss_at = len(order)
            order += [i for i in self.rerunnable[t] if values.get(self.R[t, i].name, 0.0) > 0.5]
            order.append(t)
        return order, loss_at if self.graph.loss < len(self.graph.c) else len(order)

    def start(self, schedule: Schedule) -> dict[str, float] | None:
        """Return R of a schedule; None if the schedule is not of this program's kind."""
        result = dict.fromkeys((r.name for r in self.R.values()), 0.0)
        t = 0
        for i in schedule.order:
            if i == t:
                t += 1
            elif (t, i) in self.R:
                result[self.R[t, i].name] = 1.0
            elif t >= len(self.rerunnable) or i > t or (not self.rerunnable[t] and i < self.graph.loss):
                return None
            # What is left runs again for nothing: no first run to come depends on it.
        return result


# -- The planners ----------------------------------------------------------------------------------

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

    def __init__(self, graph: CDGraph, recompute: Recompute = "any") -> None:
        self.model = CheckmateModel(graph, recompute)
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
            schedule = from_order(model.graph, order, loss_at)
            result = simulate(model.graph, schedule)
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


def recompute_of(graph: CDGraph) -> Recompute:
    """Return when forward nodes of a graph of this size may run again."""
    return "any" if len(graph.c) <= SMALL else "after-loss"


def program_of(problem: Problem) -> Checkmate:
    """Return the program of a captured model; one program serves every budget."""
    return problem.once("checkmate program", lambda: Checkmate(
        problem.graph, recompute_of(problem.graph)))


def _too_large(problem: Problem, what: str) -> Outcome | None:
    """Return the outcome for a problem that is not handed to the solver; None for others."""
    decisions = problem.once("decisions", lambda: sum(map(len, rerunnable(
        problem.graph, recompute_of(problem.graph)))))
    if decisions <= MOST_DECISIONS:
        return None
    return Outcome(None, "timeout", math.inf, note=f"not tried: {decisions:,} possible recomputations; the "
                   f"{what} takes up to {MOST_DECISIONS:,}")


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
        if (refused := _too_large(problem, "program")) is not None:
            return refused
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
            order += sorted(missing_nodes(graph, graph.outputs, there | model.held))
            there |= {j for i in order for j in graph.c[i].outputs if j in graph.outputs}
            loss_at = len(order)
        node = graph.c[t]
        made_here = set(node.outputs)
        wanted = (*node.inputs, *sorted(stay[t + 1] - made_here))
        before = sorted(missing_nodes(graph, wanted, there | model.held, {t}))
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
        limit = TIME_LIMIT if time_limit is None else time_limit
        whole = replace(whole_step(problem), note="nothing recomputed")
        if whole.peak <= budget:
            return best((whole,), budget)
        state = problem.once(self.name, Roundings)
        if (refused := _too_large(problem, "relaxation")) is not None:
            return refused
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
