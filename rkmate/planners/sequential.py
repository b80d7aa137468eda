"""Equal segments, each recomputed once: ``torch.utils.checkpoint.checkpoint_sequential``.

Rotor, section 5.3. Only the input of each segment is kept during the forward, the last segment
keeps all. The number of segments is the strategy's one parameter.
Segments are of whole stages: the children of an `nn.Sequential`, the blocks of other models.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.errors import ArgumentError
from rkmate.ir.chain import Backward, Forward, ForwardPlain, Op
from rkmate.planners.chain_programs import by_stages
from rkmate.planners.protocol import Candidate, Outcome, Problem, best, expand, judged


def segments(blocks: int, count: int) -> list[range]:
    """`count` ranges of `blocks` blocks: all of the same length, the last one takes the rest."""
    if not 1 <= count <= blocks:
        raise ArgumentError(f"count must be 1 to {blocks} segments for {blocks} blocks, "
                            f"got {count}")
    size = blocks // count
    return [range(k * size, blocks if k == count - 1 else (k + 1) * size) for k in range(count)]


def sequential(parts: list[range]) -> list[Op]:
    """Block operations (option 0) that recompute all segments but the last once."""
    result: list[Op] = [ForwardPlain(b) for part in parts[:-1] for b in part]
    for part in reversed(parts):
        result += [Forward(b, 0) for b in part]
        result += [Backward(b, 0) for b in reversed(part)]
    return result


@dataclass(frozen=True)
class Sequential:
    """Every number of segments tried, the fastest that fits taken."""

    name: str = "sequential"

    def plan(self, problem: Problem, budget: int, *, time_limit: float | None = None) -> Outcome:
        """See `rkmate.planners.protocol.Planner.plan`."""
        def make() -> list[Candidate]:
            own = by_stages(problem)
            blocks = len(own.chain)
            return [judged(own, *expand(own, sequential(segments(blocks, n))), f"{n} segments")
                    for n in range(1, blocks + 1)]

        return best(problem.once(self.name, make), budget)
