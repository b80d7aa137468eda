"""Costs before anything is measured: estimated times, and temporary memory between a lower and an upper
bound."""

from __future__ import annotations

from torch import fx

from rkmate.graph.blocks.partition import Partition
from rkmate.ir.cd import Cost
from rkmate.measure.analytic import bytes_moved
from rkmate.measure.costs import Costs
from rkmate.torch_seam.schema import operator_name

AMPLE = 4
"""No kernel that works on rows or numbers takes more temporary memory than this number of copies of all its
inputs and results."""
_SCRATCH = ("conv", "attention", "rnn", "lstm", "gru", "fft", "linalg")
"""Parts of names of operations whose temporary memory is not estimated: it depends on the machine's
libraries."""


def without_temporaries(counted: Costs) -> list[Cost]:
    """Return the least that operations take."""
    return [Cost(counted[i].time, 0) for i in range(len(counted))]


def with_ample_temporaries(partition: Partition, counted: Costs) -> list[Cost]:
    """Return costs with more memory than operations take, except for those whose temporary memory is not
    estimated."""
    return [Cost(cost.time, max(cost.overhead, AMPLE * bytes_moved(node)))
            for node, cost in _each(partition, counted)]


def with_likely_temporaries(partition: Partition, counted: Costs) -> list[Cost]:
    """Return costs with the memory of operations as estimated, or with a copy of all inputs and results if it
    is not."""
    return [cost if not _has_scratch(node) else Cost(
        cost.time, max(cost.overhead, bytes_moved(node)), cost.alternatives)
        for node, cost in _each(partition, counted)]


def _each(partition: Partition, counted: Costs) -> list[tuple[fx.Node, Cost]]:
    return [(node, counted[i]) for i, node in enumerate(partition.program.operation)]


def _has_scratch(node: fx.Node) -> bool:
    name = str(operator_name(node.target, ""))
    return any(word in name for word in _SCRATCH)
