"""The runs of blocks in a schedule, whether or not it is made of block operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rkmate.ir.cd import HOISTED, CDGraph
from rkmate.ir.chain import Backward, Forward, Op, Option
from rkmate.ir.plan import Run
from rkmate.ir.schedule import Compute, CopyIn, Free, Leave, Schedule


def runs_of_operations(ops: Iterable[Op], options: Sequence[Sequence[Option]]) -> Iterator[Run]:
    """One run an operation. `options`: those of each block."""
    for op in ops:
        chosen = op.option if isinstance(op, Forward | Backward) else None
        yield Run(op.block, "backward" if isinstance(op, Backward) else "forward", chosen,
                  None if chosen is None else options[op.block][chosen].saved_bytes)


def runs_of(schedule: Schedule, graph: CDGraph, block_of: Sequence[int]) -> Iterator[Run]:
    """Stretches of one block's computations, of the forward or of the backward.

    `block_of`: each C node's block. What a forward run keeps is what of its block is in memory when
    the next run begins.
    """
    here: tuple[int, str] | None = None
    there: set[int] = set()
    for step in schedule.steps:
        if isinstance(step, Free | Leave):
            there.discard(step.d)
        elif isinstance(step, CopyIn):
            there.add(step.d)
        elif isinstance(step, Compute) and block_of[step.c] != HOISTED:
            kind = "backward" if step.c >= graph.loss else "forward"
            place = (block_of[step.c], kind)
            if here is not None and place != here:
                yield _run(here, there, graph, block_of)
            here = place
        if isinstance(step, Compute):
            there.update(graph.c[step.c].outputs)
    if here is not None:
        yield _run(here, there, graph, block_of)


def _run(place: tuple[int, str], there: set[int], graph: CDGraph, block_of: Sequence[int]) -> Run:
    block, phase = place
    saved = None
    if phase == "forward":
        saved = graph.bytes(j for j in there if (made := graph.producer[j]) is not None
                            and made < graph.loss and block_of[made] == block)
    return Run(block, phase, None, saved)
