"""Costs without running: bytes moved and floating-point operations against machine rates.

Deterministic: for tests, and for models that do not fit on the machine that plans. Of temporary memory
inside operations, what `temporaries` knows is counted, and what an alternative kernel takes at most.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.operations import is_view
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.ir.cd import Cost, Kernel
from rkmate.measure.temporaries import bytes_of, temporary_bytes

FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 2e10
SECONDS_PER_CALL = 5e-6


def analytic_costs(partition: Partition) -> dict[int, Cost]:
    """C node -> its cost: the greater of arithmetic and memory traffic, plus a call."""
    alternatives = partition.program.alternatives
    costs: dict[int, Cost] = {}
    for i, node in enumerate(partition.program.operation):
        seconds = _seconds(node)
        # All kernels of an operation that is not tiled move the same bytes once.
        costs[i] = Cost(seconds, temporary_bytes(node, random=partition.program.cd.c[i].random), tuple(
            Kernel(_seconds_of_tiles(other.target) if isinstance(other.target, Tiled) else seconds,
                   bytes_of(other))
            for other in alternatives.get(node, ())))
    return costs


def _seconds(node: fx.Node) -> float:
    if isinstance(node.target, Tiled):
        return _seconds_of_tiles(node.target)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    moved = sum(_bytes(n.meta["val"]) for n in node.all_input_nodes) + _bytes(node.meta["val"])
    return SECONDS_PER_CALL + max(_flops(node, args, kwargs) / FLOPS_PER_SECOND,
                                  moved / BYTES_PER_SECOND)


def _seconds_of_tiles(tiled: Tiled) -> float:
    """Of all tiles; each adds to the sums where they stand, and so reads them."""
    each = sum(_seconds(n) for n in tiled.graph.nodes if n.op == "call_function" and not is_view(n)
               and n.target is not operator.getitem)
    return tiled.parts * (each + tiled.sum_bytes() / BYTES_PER_SECOND)


def _flops(node: fx.Node, args: Any, kwargs: Any) -> float:
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is not None:
        return float(count(*args, **kwargs, out_val=node.meta["val"]))
    return float(_numel(node.meta["val"]))


def _numel(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(value.shape)
    return sum(_numel(v) for v in value) if isinstance(value, (tuple, list)) else 0


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(value.shape) * value.element_size()
    return sum(_bytes(v) for v in value) if isinstance(value, (tuple, list)) else 0
