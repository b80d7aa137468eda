"""The chain's dynamic program at several memory limits, its sequences judged on the whole graph.

What the program counts is never below what the simulator sees, so more than the budget may be asked of
it as long as the simulator agrees. Blocks may keep something for forwards that run again
(`rkmate.ilp.partial_saves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.ilp.partial_saves import partial_saves
from rkmate.ir.chain import Op
from rkmate.planners.finish import without_waste
from rkmate.planners.protocol import (
    Candidate,
    Outcome,
    Problem,
    beside_chain,
    best,
    expand,
    infeasible,
    whole_step,
)
from rkmate.planners.settings import PlannerSettings
from rkmate.rotor import least, minimum, solve
from rkmate.rotor.rk_rotor import Least, Table

NOTE = "the chain's dynamic program (rk-Rotor)"


@dataclass(frozen=True)
class ChainSearch:
    """Up to `tries` limits, and the `count` fastest schedules that fit."""

    settings: PlannerSettings
    tries: int = 9
    count: int = 2
    quick: bool = False
    """Take what the table promises, and stop at a schedule that leaves less than `deep_unused` of the
    budget unused."""
    name: str = "the chain"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        lowest = smallest_of_chain(problem)
        if lowest.peak > budget:
            return infeasible(f"the chain needs {lowest.peak:,} bytes")
        fits = sorted([lowest, *self._fitting(problem, budget)], key=lambda c: c.seconds)[:self.count]
        return replace(best(fits, budget), others=tuple(fits))

    def _fitting(self, problem: Problem, budget: int) -> list[Candidate]:
        own, unused = with_partial_saves(problem, self.settings), self.settings.deep_unused
        # What the chain's model counts too much grows with the limit: search up from a sure one.
        base = max(0, budget - beside_chain(problem))
        low, high = base, max(base, budget) + (budget // 2)
        table = self._table(problem, own, base + base // 4)
        seen: dict[tuple[Op, ...], Candidate] = {}
        fits: list[Candidate] = []
        memory = base
        for _ in range(self.tries):
            ops = table.sequence(memory, prepared=not self.quick)
            if ops is None:
                low, guess = memory, None
            else:
                known = seen.get(tuple(ops))
                candidate = seen[tuple(ops)] = known or expanded(own, ops)
                guess = memory + int(budget * (1 - unused / 2)) - candidate.peak
                if candidate.peak <= budget:
                    low = memory
                    if known is None:
                        fits.append(candidate)
                    if self.quick and candidate.peak > budget * (1 - unused):
                        break
                else:
                    high = memory
            if high - low <= table.slot_bytes:
                break
            memory = guess if self.quick and guess is not None and low < guess < high else (low + high) // 2
        return fits

    def _table(self, problem: Problem, own: Problem, memory: int) -> Table:
        """The dynamic program's table for so many bytes, and less: one for small budgets, one for all."""
        small = self.settings.fine * _minimum(problem)[0]
        most = small if memory <= small else None
        slots = max(1, self.settings.slots // (1 if most is None else 2))
        return own.once(("table", slots, most), lambda: solve(own.chain, slots, most=most, known=_least(own)))


def smallest_of_chain(problem: Problem) -> Candidate:
    """The schedule with the smallest peak that the chain has, or the whole step where that is smaller."""
    def make() -> Candidate:
        found = expanded(problem, _minimum(problem)[1])
        return min(found, whole_step(problem), key=lambda c: (c.peak, c.seconds))

    return problem.once("smallest of the chain", make)


def _minimum(problem: Problem) -> tuple[int, list[Op]]:
    return problem.once("minimum", lambda: minimum(problem.chain, _least(problem)))


def _least(problem: Problem) -> Least:
    return problem.once("least", lambda: least(problem.chain))


def with_partial_saves(problem: Problem, settings: PlannerSettings) -> Problem:
    """The problem whose blocks may keep something for forwards that run again."""
    most = settings.partial_save_levels, settings.partial_saves // max(1, len(problem.chain))
    if not problem.class_graphs or len(problem.chain) > settings.partial_save_blocks or not min(most):
        return problem

    def make() -> Problem:
        chain = problem.chain
        options = {k: block.options for k, block in zip(problem.classes, chain.blocks, strict=True)}
        saves = partial_saves(problem.class_graphs, [options[k] for k in range(len(problem.class_graphs))],
                              min(most))
        blocks = tuple(replace(b, partial_saves=saves[k])
                       for b, k in zip(chain.blocks, problem.classes, strict=True))
        return replace(problem, chain=replace(chain, blocks=blocks).verify())

    return problem.once(("partial saves", min(most)), make)


def expanded(problem: Problem, ops: Sequence[Op]) -> Candidate:
    """The flat schedule of a sequence of block operations, without what nobody reads."""
    order, loss_at = expand(problem, ops)
    schedule = without_waste(problem.graph, problem.schedule(order, loss_at), problem.pinned)
    result = problem.simulate(schedule)
    return Candidate(schedule, result.peak, result.seconds, NOTE, tuple(ops))
