"""The protocol of planners: what they take and return, how their results are judged, and how they are
asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Literal, Protocol, TypeVar, runtime_checkable

from rkmate.errors import GraphError
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Backward, Chain, Op
from rkmate.ir.schedule import Schedule, from_order
from rkmate.ir.simulate import Simulation, simulate

T = TypeVar("T")
SIMULATIONS = 16
"""Schedules whose figures a problem remembers."""
Stages = tuple[Chain, tuple[tuple[int, ...], ...]]
"""A chain, and the C nodes of each of its blocks: forward, then backward."""


def once_in(memory: dict[Hashable, object], key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make`, computed once per memory and key."""
    if key not in memory:
        memory[key] = make()
    return memory[key]  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Problem:
    """A captured model: the whole graph, and the chain of its blocks."""

    graph: CDGraph
    """Forward nodes, loss, backward nodes."""
    chain: Chain
    """Blocks with their options; local C node indices."""
    block_c: tuple[tuple[int, ...], ...]
    """For each block: the C node of `graph` that each of its local C nodes is."""
    stages: Stages | None = field(default=None, repr=False)
    """A second chain of the graph: the children of an `nn.Sequential`; None for other models."""
    regions: tuple[int | None, ...] = field(default=(), repr=False)
    """For each C node, the region that the program checkpoints it in, or None; empty if the program
    checkpoints nothing."""
    of_graph: InitVar[dict[Hashable, object] | None] = None
    """Results computed from the graph alone, to which `once_of_graph` adds; a copy with another graph has a
    memory of its own."""
    _memory: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)
    _of_graph: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self, of_graph: dict[Hashable, object] | None) -> None:
        if of_graph is not None:
            object.__setattr__(self, "_of_graph", of_graph)

    def with_chain(self, chain: Chain) -> Problem:
        """Return the problem with other options of its blocks. What was computed of the graph alone stays
        known."""
        return replace(self, chain=chain, of_graph=self._of_graph)

    def with_reserve(self, reserve_at_loss: int) -> Problem:
        """Return the problem with other bytes for the loss."""
        return replace(self, graph=self.graph.with_reserve(reserve_at_loss))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, computed once per problem. `make` is a pure function of the problem,
        or makes a table of such results that is filled as time allows. The result does not depend on the
        budgets that were asked before."""
        return once_in(self._memory, key, make)

    def once_of_graph(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, as `once` does; it depends on the graph alone, and serves the problems
        with other options of the same blocks, too."""
        return once_in(self._of_graph, key, make)

    def simulate(self, schedule: Schedule) -> Simulation:
        """Return the judge's word on a schedule. The latest ones are remembered: several steps of a search
        ask for one schedule."""
        latest: dict[Schedule, Simulation] = self.once_of_graph("simulations", dict)
        found = latest.pop(schedule, None) or simulate(self.graph, schedule)
        latest[schedule] = found
        if len(latest) > SIMULATIONS:
            del latest[next(iter(latest))]
        return found

    def schedule(self, order: Sequence[int], loss_at: int) -> Schedule:
        """Return the schedule that runs an order and frees as early as possible."""
        return from_order(self.graph, order, loss_at)


@dataclass(frozen=True)
class Candidate:
    """A schedule and its simulated figures."""

    schedule: Schedule
    peak: int
    """Bytes."""
    seconds: float
    note: str = ""
    ops: tuple[Op, ...] = ()
    """The block operations that it is made of; empty when it is not made of such."""


@dataclass(frozen=True)
class Outcome:
    """Result of a planner for one budget."""

    schedule: Schedule | None
    """Simulates within the budget; None when `status` is not ok."""
    status: Literal["ok", "infeasible", "timeout"]
    """``infeasible``: this planner has no schedule within the budget, another one may."""
    seconds: float
    """Time of the schedule, waits for copies included; inf without one."""
    bound: float | None = None
    """Lower bound, in seconds, of what any schedule of the planner's kind takes; None: unknown."""
    note: str = ""
    """Text for the user: the choice made, a gap, a limit that was hit."""
    ops: tuple[Op, ...] = ()
    """The block operations that the schedule is made of; empty when it is not made of such."""
    smallest: int | None = None
    """Bytes of the smallest budget that the planner is known to meet; None: unknown."""
    cut_short: bool = False
    """Whether the planner's time was over before it was done."""
    worked: float | None = None
    """Seconds that the search counts for, equal on every machine; None where it does not count its work."""
    first_seconds: float | None = None
    """Time of the first schedule that was found within the budget; None: there was one only."""
    others: tuple[Candidate, ...] = field(default=(), repr=False)
    """Other schedules that were found; they may serve other budgets."""


class Planner(Protocol):
    """A method that turns a problem and a budget into a schedule."""

    @property
    def name(self) -> str:
        """The planner's name in the registry."""

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """Return the fastest schedule that the planner knows within `budget` bytes.

        `time_limit`: seconds of planning, for planners that can stop early; None: their default.
        """


@runtime_checkable
class Composed(Planner, Protocol):
    """A planner that asks other planners. If the whole step fits, it recomputes nothing, and needs no options
    of blocks."""

    @property
    def asks(self) -> tuple[str, ...]:
        """Names of the planners that this one asks."""

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None,
             known: Sequence[Candidate] | None = None) -> Outcome:
        """See `Planner.plan`. `known`: schedules for other budgets of the problem. Unless it is None, spend
        less time than on a first budget, and begin with the fastest of those that fit."""

    def smallest(self, problem: Problem, above: int) -> Candidate:
        """Return the schedule with the smallest peak that it knows, where a budget of `above` bytes is too
        small. It depends on the problem and the settings, whatever was asked before, and on the clock where
        a search takes long."""


def ask(planner: Planner, problem: Problem, budget: int, *, time_limit: float | None = None,
        known: Sequence[Candidate] | None = None) -> Outcome:
    """Return a planner's outcome within a budget.

    `known`: what was found for other budgets of the same problem, None at the first one. One that fits
    and is faster is taken, so that more memory is never slower.
    """
    if isinstance(planner, Composed):
        outcome = planner.plan(problem, budget, time_limit=time_limit, known=known)
    else:
        outcome = planner.plan(problem, budget, time_limit=time_limit)
    inside = [c for c in known or () if c.peak <= budget]
    winner = min(inside, key=lambda c: (c.seconds, c.peak), default=None)
    if winner is None or winner.seconds >= outcome.seconds:
        return outcome
    return replace(outcome, schedule=winner.schedule, status="ok", seconds=winner.seconds, ops=winner.ops,
                   note=winner.note)


def found_in(problem: Problem, outcome: Outcome) -> tuple[Candidate, ...]:
    """Return all schedules of an outcome, for other budgets to know."""
    return (*taken_in(problem, outcome), *outcome.others)


def taken_in(problem: Problem, outcome: Outcome) -> tuple[Candidate, ...]:
    """Return the schedule that an outcome took; none where it has none."""
    if outcome.schedule is None:
        return ()
    simulation = problem.simulate(outcome.schedule)
    return (Candidate(outcome.schedule, simulation.peak, simulation.seconds, outcome.note, outcome.ops),)


def infeasible(note: str = "") -> Outcome:
    """Return an outcome without a schedule."""
    return Outcome(None, "infeasible", float("inf"), note=note)


def expand(problem: Problem, ops: Iterable[Op]) -> tuple[list[int], int]:
    """Return the order of C nodes of a sequence of block operations, and where the loss stands in it.

    C nodes that belong to no block (constants, computed once and kept) run first. Raises
    `GraphError` when a backward node belongs to no block.
    """
    graph, chain = problem.graph, problem.chain
    order = list(hoisted(problem))
    if any(c >= graph.loss for c in order):
        raise GraphError(f"{graph.c[order[-1]].name} is a backward node of no block")
    plain = [[c for c in block if c < graph.loss] for block in problem.block_c]
    loss_at = None
    for op in ops:
        if isinstance(op, Backward) and loss_at is None:
            loss_at = len(order)
        nodes = chain.nodes(op)
        order += plain[op.block] if nodes is None else [problem.block_c[op.block][c] for c in nodes]
    return order, len(order) if loss_at is None else loss_at


def hoisted(problem: Problem) -> tuple[int, ...]:
    """Return the C nodes that belong to no block: constants, computed once and kept."""
    inside = {c for block in problem.block_c for c in block}
    return tuple(c for c in range(len(problem.graph.c)) if c not in inside)


def beside_chain(problem: Problem) -> int:
    """Return bytes that are in memory next to the chain: what is hoisted for its blocks, and what the user
    holds."""
    graph, outside = problem.graph, frozenset(hoisted(problem))
    constants = {j for i in outside for j in graph.c[i].outputs
                 if any(r not in outside for r in graph.readers[j])}
    return graph.bytes(constants | set(graph.outputs))


def judged(problem: Problem, order: Sequence[int], loss_at: int, note: str = "") -> Candidate:
    """Simulate an order of computations."""
    schedule = problem.schedule(order, loss_at)
    simulation = problem.simulate(schedule)
    return Candidate(schedule, simulation.peak, simulation.seconds, note)


def whole_step(problem: Problem) -> Candidate:
    """Return the candidate that runs every computation once, in the graph's order."""
    graph = problem.graph
    return problem.once_of_graph("whole step", lambda: judged(problem, range(len(graph.c)), graph.loss))


def best(candidates: Iterable[Candidate], budget: int, note: str = "") -> Outcome:
    """Return the fastest candidate whose simulated peak is within the budget.

    If a planner's candidates do not depend on the budget, a plan with more memory is never slower.
    """
    inside = [c for c in candidates if c.peak <= budget]
    if not inside:
        return infeasible(note)
    winner = min(inside, key=lambda c: (c.seconds, c.peak))
    return Outcome(winner.schedule, "ok", winner.seconds, note=winner.note or note, ops=winner.ops)


@dataclass(frozen=True)
class Fixed:
    """A planner whose schedules depend on the problem alone: it takes the fastest that fits."""

    name: str
    candidates: Callable[[Problem], list[Candidate]]

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `Planner.plan`."""
        return best(problem.once(self.name, lambda: self.candidates(problem)), budget)


SMALLEST_SECONDS = 4.0
"""Seconds that a planner may be asked for smaller and smaller budgets: an error should not take minutes."""
SMALLEST_TRIES = 24
"""Number of times that the range is halved, at most."""


def smallest(planner: Planner, problem: Problem, above: int) -> Candidate | None:
    """Return the schedule with the smallest peak that a planner is known to find, to be named where a budget
    is too small; None where it has no schedule at all.

    Found by bisection on what the planner returns, unless the planner knows it. `above`: a budget that it
    does not meet. Each try has a quarter of the time that is left: a planner that answers at once is asked
    `SMALLEST_TRIES` times, one that takes long is asked less and less thoroughly.
    """
    if isinstance(planner, Composed):
        return planner.smallest(problem, above)
    until = time.perf_counter() + SMALLEST_SECONDS
    best: Candidate | None = None
    low, high = above, 2 * max(above, whole_step(problem).peak)
    for _ in range(SMALLEST_TRIES):
        left = until - time.perf_counter()
        if left <= 0:
            break
        middle = high if best is None else (low + high) // 2
        outcome = planner.plan(problem, middle, time_limit=left / 4)
        if outcome.schedule is not None:
            best, = taken_in(problem, outcome)
            high = best.peak
        elif best is None:
            return None
        else:
            low = middle
        if high - low <= 1:
            break
    return best
