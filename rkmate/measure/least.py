"""Find what an operation does in every schedule: its smallest memory, and the input that it overwrites."""

from __future__ import annotations

from collections.abc import Callable

from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Partition
from rkmate.ir.cd import HOISTED, CDGraph


def hoisted(partition: Partition) -> frozenset[int]:
    """Return the D nodes of constants that are computed once and stay."""
    c = partition.program.cd.c
    return frozenset(j for i, b in enumerate(partition.block_of) if b == HOISTED for j in c[i].outputs)


def bytes_alone(cd: CDGraph, i: int, constants: frozenset[int]) -> int:
    """Return the bytes that a C node takes alone: its inputs and results (a result overwrites an input if
    possible), and the constants. Temporary memory, which is known after a run, is not counted."""
    node = cd.c[i]
    values = sum(cd.d[j].size for j in {*node.inputs, *node.outputs, *constants})
    return values - max((cd.d[j].size for j in node.donors), default=0)


def least_bytes(partition: Partition) -> int:
    """Return bytes that the largest operation takes alone: no schedule takes less."""
    cd, constants = partition.program.cd, hoisted(partition)
    return max((bytes_alone(cd, i, constants) for i in range(len(cd.c))), default=0)


def surely_over(program: Program, i: int, ours: Callable[[int], bool]) -> int | None:
    """Return the D node that an operator of the package's own overwrites in every schedule, because nothing
    reads it later. Measured without overwriting it, the operator would include an allocation that no schedule
    makes."""
    cd = program.cd
    own = getattr(program.operation[i].target, "namespace", "") == "rkmate" and i >= cd.loss
    return next((j for j in cd.c[i].donors if own and max(cd.readers[j]) == i and ours(j)
                 and j not in {*cd.outputs, *program.pinned}), None)
