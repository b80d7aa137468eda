"""Costs of single operations, by what they read and how: what one graph has told serves the next.

Variants of a model's graph are cut into other blocks and have most of their operations in common. One that is
known is not measured again: that saves time, and variants are compared by the same numbers, whatever else the
machine did while each was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, kind_of
from rkmate.graph.capture.operations import is_view
from rkmate.ir.cd import Cost
from rkmate.torch_seam.nodes import VALUE


class KnownOperations:
    """What is known of the C nodes of one graph."""

    def __init__(self, partition: Partition, known: dict[Hashable, Cost]) -> None:
        """`known`: by `form_of` an operation; to be read and filled."""
        self._operation = partition.program.operation
        self._known = known

    def add(self, nodes: Sequence[int], costs: Sequence[Cost], without: Collection[int] = ()) -> None:
        """Take down the costs of some C nodes; what is known already stays."""
        for i, cost in zip(nodes, costs, strict=True):
            if i not in without:
                self._known.setdefault(form_of(self._operation[i]), cost)

    def of(self, nodes: Iterable[int]) -> dict[int, Cost]:
        """The costs of those that are known."""
        found = ((i, self._known.get(form_of(self._operation[i]))) for i in nodes)
        return {i: cost for i, cost in found if cost is not None}


def form_of(node: fx.Node) -> Hashable:
    """What an operation's cost depends on, as far as its trace knows: the operator, and the forms of what it
    reads, views with what they look at."""
    args = node.args
    if node.target in (FORWARD, BACKWARD):       # of an opaque module, what it is, and not its number
        args = (kind_of(str(args[0])), *args[1:])
    return node.target, _frozen(args), tuple((k, _frozen(v)) for k, v in sorted(node.kwargs.items()))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        seen = form_of(value) if value.op == "call_function" and is_view(value) else None
        return _frozen(value.meta.get(VALUE)), seen
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return repr(value)
