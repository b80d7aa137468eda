"""The dynamic programs over the chain as planners: rk-rotor, rotor, revolve.

- ``rk-rotor``: rk-Rotor with all options of each block (Rockmate, section 3.4).
- ``rotor``: one option a block, the one that keeps all and recomputes nothing (Rotor, theorem 1).
- ``revolve``: cuts only are kept; each backward follows its block's own forward at once (the
  automatic-differentiation model; Rotor, section 5.3, and appendix C of Gruslys et al. 2016).

For an `nn.Sequential`, the last two work on the chain of its children, as the papers do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rkmate.ir.chain import Chain, Op
from rkmate.planners.protocol import Candidate, Outcome, Problem, expand, infeasible, judged
from rkmate.rotor.rk_rotor import Table, solve

SLACK = 1.1
"""How much the chain's own estimate of the peak may exceed the budget before a sequence is not
worth simulating: the estimate counts cuts whole, the simulator sees what dies earlier."""


def one_option(chain: Chain) -> Chain:
    """The same chain with only the fastest option of each block."""
    blocks = []
    for block in chain.blocks:
        keep = min(block.options, key=lambda o: (o.forward_seconds + o.backward_seconds,
                                                 o.saved_bytes))
        blocks.append(replace(block, options=(keep,)))
    return replace(chain, blocks=tuple(blocks))


def by_stages(problem: Problem) -> Problem:
    """The problem as the literature before Rockmate has it: one option a stage, and the children of
    an `nn.Sequential` for stages. The stages of other models are the blocks."""
    chain, block_c = problem.stages or (problem.chain, problem.block_c)
    return replace(problem, chain=one_option(chain), block_c=block_c)


def revolve(chain: Chain, slots: int = 500, slot_bytes: int | None = None) -> Table:
    """The optimal sequence that keeps inputs of blocks only, for every budget in bytes.

    Rotor, section 5.3: the dynamic program of the automatic-differentiation model for
    heterogeneous chains, made valid by a forward that saves all right before each backward.
    """
    return solve(one_option(chain), slots, slot_bytes, keep=False)


def rotor(chain: Chain, slots: int = 500, slot_bytes: int | None = None) -> Table:
    """Rotor's optimal sequence for every budget: each block keeps all or nothing."""
    return solve(one_option(chain), slots, slot_bytes)


@dataclass(frozen=True)
class ChainProgram:
    """A table over the chain, its sequences judged on the whole graph."""

    name: str

    def _problem(self, problem: Problem) -> Problem:
        return problem if self.name == "rk-rotor" else by_stages(problem)

    def _table(self, chain: Chain) -> Table:
        if self.name == "rk-rotor":
            return solve(chain)
        return rotor(chain) if self.name == "rotor" else revolve(chain)

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        own = problem.once((self.name, "problem"), lambda: self._problem(problem))
        table = problem.once((self.name, "table"), lambda: self._table(own.chain))
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
