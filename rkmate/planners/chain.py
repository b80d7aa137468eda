"""Planners that work on the chain of blocks; the simulator judges their sequences on the whole graph.

- ``rk-rotor``: rk-Rotor with all options of each block (Rockmate, section 3.4).
- ``rotor``: one option a block, the one that keeps all and recomputes nothing (Rotor, theorem 1).
- ``revolve``: cuts only are kept; each backward follows its block's own forward at once (the
  automatic-differentiation model; Rotor, section 5.3, and appendix C of Gruslys et al. 2016).
- ``sequential``: equal segments, each recomputed once, as ``torch.utils.checkpoint.checkpoint_sequential``
  does (Rotor, section 5.3). Only the input of each segment is kept during the forward, the last segment keeps
  all. The number of segments is the strategy's one parameter.
- ``save-all``, ``recompute-all``: the two ends of the scale.
- `CHECKPOINTING`, which the default planner asks: layers that run again as a whole, as under
  ``torch.utils.checkpoint``.
- `ChainSearch`, which the default planner asks: rk-Rotor at several memory limits. What the dynamic program
  counts is never below what the simulator sees, so more than the budget may be asked of it as long as the
  simulator agrees.

For an `nn.Sequential`, ``rotor``, ``revolve`` and ``sequential`` work on the chain of its children, as the
papers do; for other models, on the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.errors import ArgumentError
from rkmate.ir.chain import Backward, Chain, Forward, ForwardPlain, Op
from rkmate.ir.recompute import checkpointed
from rkmate.ir.schedule import unmet_wishes
from rkmate.planners.finish import without_waste
from rkmate.planners.protocol import (
    Candidate,
    Fixed,
    Outcome,
    Problem,
    beside_chain,
    best,
    expand,
    infeasible,
    judged,
    whole_step,
)
from rkmate.planners.settings import PlannerSettings
from rkmate.rotor.rk_rotor import Least, Table, least, minimum, solve

SLACK = 1.1
"""Factor by which the chain's own estimate of the peak may exceed the budget before a sequence is not worth
simulating: the estimate counts cuts whole, the simulator sees what dies earlier."""


def one_option(chain: Chain) -> Chain:
    """Return the chain with only the fastest option of each block."""
    blocks = []
    for block in chain.blocks:
        keep = min(block.options, key=lambda o: (o.forward_seconds + o.backward_seconds,
                                                 o.saved_bytes))
        blocks.append(replace(block, options=(keep,)))
    return replace(chain, blocks=tuple(blocks))


def by_stages(problem: Problem) -> Problem:
    """Return the problem as the literature before Rockmate has it: one option a stage.

    Stages are the children of an `nn.Sequential`, and the blocks of other models.
    """
    chain, block_c = problem.stages or (problem.chain, problem.block_c)
    return replace(problem, chain=one_option(chain), block_c=block_c)


@dataclass(frozen=True)
class ChainProgram:
    """A table over the chain, its sequences judged on the whole graph."""

    name: str
    whole_options: bool = False
    """Whether each block has only the option that keeps all of its data (`by_stages`)."""
    keep: bool = True
    """Whether what an option saves may stay while later blocks run. Without it, the dynamic program is that
    of the automatic-differentiation model (Rotor, section 5.3), made valid by a forward that saves all right
    before each backward."""

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        own = problem if not self.whole_options else \
            problem.once((self.name, "problem"), lambda: by_stages(problem))
        table = problem.once((self.name, "table"), lambda: solve(own.chain, keep=self.keep))
        estimates = problem.once((self.name, "sequences"), lambda: sorted(
            table.candidates(), key=lambda pair: pair[0].seconds))
        choices = [(cost.seconds, cost.peak_bytes, ops) for cost, ops in estimates]
        promised = table.promised(budget)
        if promised is not None:
            choices.append((promised[0].seconds, promised[0].peak_bytes, promised[1]))
            choices.sort(key=lambda choice: choice[0])
        for _, peak, ops in choices:
            if peak <= SLACK * budget:
                candidate = self._judged(own, ops)
                if candidate.peak <= budget:
                    return Outcome(candidate.schedule, "ok", candidate.seconds)
        return infeasible(f"the chain needs {table.minimum_bytes} bytes")

    def _judged(self, problem: Problem, ops: list[Op]) -> Candidate:
        key = (self.name, tuple(ops))
        return problem.once(key, lambda: judged(problem, *expand(problem, ops)))


def segments(blocks: int, count: int) -> list[range]:
    """Return `count` ranges of `blocks` blocks: all of the same length, except the last one, which takes the
    rest."""
    if not 1 <= count <= blocks:
        raise ArgumentError(f"count must be 1 to {blocks} segments for {blocks} blocks, "
                            f"got {count}")
    size = blocks // count
    return [range(k * size, blocks if k == count - 1 else (k + 1) * size) for k in range(count)]


def sequential(parts: list[range]) -> list[Op]:
    """Return block operations (option 0) that recompute all segments except the last one, once."""
    result: list[Op] = [ForwardPlain(b) for part in parts[:-1] for b in part]
    for part in reversed(parts):
        result += [Forward(b, 0) for b in part]
        result += [Backward(b, 0) for b in reversed(part)]
    return result


def _equal_segments(problem: Problem) -> list[Candidate]:
    """Return a schedule for each number of segments."""
    own = by_stages(problem)
    blocks = len(own.chain)
    return [judged(own, *expand(own, sequential(segments(blocks, n))), f"{n} segments")
            for n in range(1, blocks + 1)]


SEQUENTIAL = Fixed("sequential", _equal_segments)

MOST_BLOCKS = 4
"""Blocks of the chain that run again together, at most."""


def _regions(problem: Problem) -> list[Candidate]:
    """Return schedules that keep the inputs of regions, and run each region again as a whole in the backward:
    those that the program checkpoints, and up to `MOST_BLOCKS` blocks of the chain at a time."""
    graph, found = problem.graph, []
    for region in filter(None, (problem.regions, *(
            _groups(problem, n) for n in range(1, MOST_BLOCKS + 1)))):
        schedule = checkpointed(graph, region)
        if not unmet_wishes(graph, schedule):
            result = problem.simulate(schedule)
            found.append(Candidate(schedule, result.peak, result.seconds))
    return found


def _groups(problem: Problem, size: int) -> tuple[int | None, ...]:
    """Return, for each C node, the number of its group of `size` blocks."""
    region: list[int | None] = [None] * len(problem.graph.c)
    for number, nodes in enumerate(problem.block_c):
        for i in nodes:
            region[i] = number // size if i < problem.graph.loss else None
    return tuple(region)


CHECKPOINTING = Fixed("checkpointing", _regions)


def recompute_all(chain: Chain) -> list[Op]:
    """Return the sequence that keeps no cut: each block's backward starts again from the model's input.

    Of a block's options it takes the one that needs the least memory between its forward and its
    backward, which follow each other at once. Time grows with the square of the number of blocks.
    """
    result: list[Op] = []
    for b in range(len(chain) - 1, -1, -1):
        result += [ForwardPlain(j) for j in range(b)]
        options = chain.blocks[b].options
        least = min(range(len(options)), key=lambda k: (
            max(options[k].forward_peak_bytes, options[k].backward_peak_bytes),
            options[k].forward_seconds + options[k].backward_seconds))
        result += [Forward(b, least), Backward(b, least)]
    return result


SAVE_ALL = Fixed("save-all", lambda problem: [whole_step(problem)])
RECOMPUTE_ALL = Fixed("recompute-all", lambda problem: [
    judged(problem, *expand(problem, recompute_all(problem.chain)))])

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
        unused = self.settings.deep_unused
        # What the chain's model counts too much grows with the limit: search up from a sure one.
        base = max(0, budget - beside_chain(problem))
        low, high = base, max(base, budget) + (budget // 2)
        table = self._table(problem, base + base // 4)
        seen: dict[tuple[Op, ...], Candidate] = {}
        fits: list[Candidate] = []
        memory = base
        for _ in range(self.tries):
            ops = table.sequence(memory, prepared=not self.quick)
            if ops is None:
                low, guess = memory, None
            else:
                known = seen.get(tuple(ops))
                candidate = seen[tuple(ops)] = known or expanded(problem, ops)
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

    def _table(self, problem: Problem, memory: int) -> Table:
        """Return the dynamic program's table for `memory` bytes and less. There are two: one for small
        budgets, one for all."""
        small = self.settings.fine * _minimum(problem)[0]
        most = small if memory <= small else None
        slots = max(1, self.settings.slots // (1 if most is None else 2))
        return problem.once(("table", slots, most),
                            lambda: solve(problem.chain, slots, most=most, known=_least(problem)))


def smallest_of_chain(problem: Problem) -> Candidate:
    """Return the schedule with the smallest peak that the chain has, or the whole step where that is
    smaller."""
    def make() -> Candidate:
        found = expanded(problem, _minimum(problem)[1])
        return min(found, whole_step(problem), key=lambda c: (c.peak, c.seconds))

    return problem.once("smallest of the chain", make)


def _minimum(problem: Problem) -> tuple[int, list[Op]]:
    return problem.once("minimum", lambda: minimum(problem.chain, _least(problem)))


def _least(problem: Problem) -> Least:
    return problem.once("least", lambda: least(problem.chain))


def expanded(problem: Problem, ops: Sequence[Op]) -> Candidate:
    """Return the flat schedule of a sequence of block operations, without values that nothing reads."""
    schedule = without_waste(problem.graph, *expand(problem, ops))
    result = problem.simulate(schedule)
    return Candidate(schedule, result.peak, result.seconds, NOTE, tuple(ops))
