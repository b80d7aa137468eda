"""What is known of costs without a measurement: bounds, and the least bytes of an operation."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Partition
from rkmate.ir.cd import HOISTED, CDGraph, Cost
from rkmate.measure.analytic import bytes_moved
from rkmate.measure.costs import Costs
from rkmate.torch_seam.schema import operator_name

# -- The least bytes -------------------------------------------------------------------------------
#
# What an operation does in every schedule: the memory that it takes at least, and over what it writes.


def hoisted(partition: Partition) -> frozenset[int]:
    """D nodes of the constants that are computed once, and stay."""
    c = partition.program.cd.c
    return frozenset(j for i, b in enumerate(partition.block_of) if b == HOISTED for j in c[i].outputs)


def bytes_alone(cd: CDGraph, i: int, constants: frozenset[int]) -> int:
    """Bytes that a C node takes when nothing else is there: what it reads and makes, where its result takes
    the place of an input if it can, and the constants. Temporary memory, known when it has run, is left out.
    """
    node = cd.c[i]
    values = sum(cd.d[j].size for j in {*node.inputs, *node.outputs, *constants})
    return values - max((cd.d[j].size for j in node.donors), default=0)


def least_bytes(partition: Partition) -> int:
    """Bytes that the largest operation takes alone: no schedule takes less."""
    cd, constants = partition.program.cd, hoisted(partition)
    return max((bytes_alone(cd, i, constants) for i in range(len(cd.c))), default=0)


def surely_over(program: Program, i: int, ours: Callable[[int], bool]) -> int | None:
    """The D node over which a C node of an operator of our own writes in every schedule, as nothing reads it
    later: with a result of its own, it has work that is spared there. `ours`: which belong to a block."""
    cd = program.cd
    own = getattr(program.operation[i].target, "namespace", "") == "rkmate" and i >= cd.loss
    return next((j for j in cd.c[i].donors if own and max(cd.readers[j]) == i and ours(j)
                 and j not in {*cd.outputs, *program.pinned}), None)


# -- Bounds ----------------------------------------------------------------------------------------
#
# Costs before anything is measured: times as counted, and temporary memory between what is sure and what is
# ample.


AMPLE = 4
"""No kernel that works on rows or numbers takes more temporary memory than so many copies of all that it
reads and makes."""
_SCRATCH = ("conv", "attention", "rnn", "lstm", "gru", "fft", "linalg")
"""In the names of operations whose temporary memory is not counted: it hangs on the machine's libraries."""


def without_temporaries(counted: Costs) -> list[Cost]:
    """The least that operations take."""
    return [Cost(counted[i].time, 0) for i in range(len(counted))]


def with_ample_temporaries(partition: Partition, counted: Costs) -> list[Cost]:
    """More than operations take, but for those whose temporary memory is not counted."""
    return [Cost(cost.time, max(cost.overhead, AMPLE * bytes_moved(node)))
            for node, cost in _each(partition, counted)]


def with_likely_temporaries(partition: Partition, counted: Costs) -> list[Cost]:
    """What operations take as far as it is counted, and a copy of all that they read and make where it is
    not."""
    return [cost if not _has_scratch(node) else Cost(
        cost.time, max(cost.overhead, bytes_moved(node)), cost.alternatives)
        for node, cost in _each(partition, counted)]


def _each(partition: Partition, counted: Costs) -> list[tuple[fx.Node, Cost]]:
    return [(node, counted[i]) for i, node in enumerate(partition.program.operation)]


def _has_scratch(node: fx.Node) -> bool:
    name = str(operator_name(node.target, ""))
    return any(word in name for word in _SCRATCH)

