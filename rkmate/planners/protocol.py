"""What every planner takes and returns, and how its result is judged."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from rkmate.errors import GraphError
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Backward, Chain, Op
from rkmate.ir.schedule import Schedule, from_order
from rkmate.ir.simulate import Simulation, simulate

T = TypeVar("T")
Stages = tuple[Chain, tuple[tuple[int, ...], ...]]
"""A chain, and the C nodes of each of its blocks: forward, then backward."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A captured model: the whole graph, and the same as a chain of blocks."""

    graph: CDGraph
    """Forward nodes, loss, backward nodes."""
    chain: Chain
    """Blocks with their options; local C node indices."""
    block_c: tuple[tuple[int, ...], ...]
    """For each block: the C node of `graph` that each of its local C nodes is."""
    pinned: tuple[int, ...] = ()
    """D nodes that the user holds (outputs of the model): never forgotten."""
    reserve_at_loss: int = 0
    """Bytes that the loss, computed outside of the graph, allocates for itself."""
    stages: Callable[[], Stages | None] = field(default=lambda: None, repr=False)
    """Another chain of the same graph: the children of an `nn.Sequential`; None for other models."""
    _memory: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, computed once per problem: asking for a second budget is cheap."""
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]  # type: ignore[return-value]

    def simulate(self, schedule: Schedule) -> Simulation:
        """The judge's word on a schedule."""
        return simulate(self.graph, schedule, pinned=self.pinned,
                        reserve_at_loss=self.reserve_at_loss)

    def schedule(self, order: Sequence[int], loss_at: int) -> Schedule:
        """The schedule that runs an order and forgets as early as possible."""
        return from_order(self.graph, order, loss_at, self.pinned)


@dataclass(frozen=True)
class Outcome:
    """What a planner found for one budget."""

    schedule: Schedule | None
    """Simulates within the budget; None when `status` is not ok."""
    status: Literal["ok", "infeasible", "timeout"]
    """``infeasible``: this planner has no schedule within the budget, another one may."""
    seconds: float
    """Time of the schedule's computations; inf without one."""
    bound: float | None = None
    """Lower bound, in seconds, of what any schedule of the planner's kind takes; None: unknown."""
    note: str = ""
    """What a user should know: the choice made, a gap, a limit that was hit."""


class Planner(Protocol):
    """One method: a problem and a budget in, a schedule out."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """The fastest schedule that the planner knows within `budget` bytes.

        `time_limit`: seconds of planning, for planners that can stop early; None: their default.
        """


def infeasible(note: str = "") -> Outcome:
    """No schedule within the budget."""
    return Outcome(None, "infeasible", float("inf"), note=note)


def expand(problem: Problem, ops: Iterable[Op]) -> tuple[list[int], int]:
    """The order of C nodes of a sequence of block operations, and where the loss stands in it.

    C nodes that belong to no block (constants, computed once and kept) run first. Raises
    `GraphError` when a backward node belongs to no block.
    """
    graph, chain = problem.graph, problem.chain
    inside = {c for block in problem.block_c for c in block}
    order = [c for c in range(len(graph.c)) if c not in inside]
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


@dataclass(frozen=True)
class Candidate:
    """A schedule and the judge's figures."""

    schedule: Schedule
    peak: int
    """Bytes."""
    seconds: float
    note: str = ""


def judged(problem: Problem, order: Sequence[int], loss_at: int, note: str = "") -> Candidate:
    """Simulate an order of computations."""
    schedule = problem.schedule(order, loss_at)
    simulation = problem.simulate(schedule)
    return Candidate(schedule, simulation.peak, simulation.seconds, note)


def best(candidates: Iterable[Candidate], budget: int, note: str = "") -> Outcome:
    """The fastest candidate whose simulated peak is within the budget.

    Where a planner's candidates do not depend on the budget, more memory is never slower.
    """
    inside = [c for c in candidates if c.peak <= budget]
    if not inside:
        return infeasible(note)
    winner = min(inside, key=lambda c: (c.seconds, c.peak))
    return Outcome(winner.schedule, "ok", winner.seconds, note=winner.note or note)
