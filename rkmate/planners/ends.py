"""The two ends of the scale: keep everything, keep nothing."""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.ir.chain import Backward, Chain, Forward, ForwardPlain, Op
from rkmate.planners.protocol import Outcome, Problem, best, expand, judged, whole_step
from rkmate.rotor.rk_rotor import fastest


def save_all(chain: Chain) -> list[Op]:
    """Every block once, with its fastest option."""
    return fastest(chain)


def recompute_all(chain: Chain) -> list[Op]:
    """No cut is kept: each block's backward starts again from the model's input.

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


@dataclass(frozen=True)
class SaveAll:
    """Every computation once, in the graph's order."""

    name: str = "save-all"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        return best([whole_step(problem)], budget)


@dataclass(frozen=True)
class RecomputeAll:
    """Each block recomputed from the model's input."""

    name: str = "recompute-all"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        return best(problem.once(self.name, lambda: [
            judged(problem, *expand(problem, recompute_all(problem.chain)))]), budget)
