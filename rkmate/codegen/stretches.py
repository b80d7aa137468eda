"""A schedule cut where one function ends and the next begins. No torch.

A stretch is of one block, and becomes one slice. Copies stand between stretches: what one reads has arrived
before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rkmate.codegen.slices import CopyWord
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Free, Leave, Loss, Schedule

_WORDS: dict[type, CopyWord] = {CopyOut: "copy_out", Leave: "leave", CopyIn: "copy_in"}


@dataclass
class Stretch:
    """Steps of one block that become one slice."""

    block: int
    steps: list[Compute | Free] = field(default_factory=list)
    closed: bool = False
    """Whether it ends with what is freed without having been read in it."""
    touched: set[int] = field(default_factory=set, repr=False)
    """Nodes that its computations read and make."""

    def add(self, step: Compute | Free, cd: CDGraph) -> None:
        if isinstance(step, Compute):
            self.touched.update(cd.c[step.c].inputs, cd.c[step.c].outputs)
        else:
            self.closed = self.closed or step.d not in self.touched
        self.steps.append(step)


@dataclass(frozen=True)
class Copied:
    """A D node goes away, or comes back."""

    word: CopyWord
    d: int


Part = Stretch | Copied


@dataclass(frozen=True)
class Stretches:
    """Of a whole schedule."""

    before: list[Part] = field(default_factory=list)
    """In the forward."""
    at_loss: list[int] = field(default_factory=list)
    """D nodes that are freed at the loss."""
    segments: list[tuple[list[Part], int]] = field(default_factory=list)
    """Per segment of the backward: its parts, and the C node that ends it."""


def cut_schedule(cd: CDGraph, schedule: Schedule, block_of: Sequence[int], ends: Sequence[int]) -> Stretches:
    """Cut a schedule into stretches. `block_of`: the block of each C node. `ends`: the C nodes that end
    segments of the backward."""
    result = Stretches()
    last = set(ends)
    current: list[Part] | None = result.before      # None: between the loss and what is computed next
    closing: int | None = None
    coming: set[int] = set()
    for step in schedule.steps:
        if isinstance(step, Loss):
            current = None
            continue
        if isinstance(step, Free) and current is None:
            result.at_loss.append(step.d)
            continue
        if isinstance(step, Free) and current and isinstance(current[-1], Stretch):
            current[-1].add(step, cd)
            continue
        if current is None:
            current = []
        if closing is not None:
            result.segments.append((current, closing))
            current, closing = [], None
        if isinstance(step, Free):                  # after a copy
            current.append(Stretch(_block_before(current)))
        elif isinstance(step, Compute):
            arriving = sorted(coming.intersection(cd.c[step.c].inputs))
            coming.difference_update(arriving)
            current += [Copied("arrive", d) for d in arriving]
            block = block_of[step.c]
            end = current[-1] if current else None
            if not isinstance(end, Stretch) or end.block != block or end.closed:
                current.append(Stretch(block))
            if step.c in last:
                closing = step.c
        else:
            current.append(Copied(_WORDS[type(step)], step.d))
            if isinstance(step, CopyIn):
                coming.add(step.d)
            continue
        end = current[-1]
        assert isinstance(end, Stretch)
        end.add(step, cd)
    if closing is not None and current is not None:
        result.segments.append((current, closing))
    return result


def _block_before(parts: Sequence[Part]) -> int:
    return next((p.block for p in reversed(parts) if isinstance(p, Stretch)), 0)
