"""Costs without running: bytes moved and floating-point operations against the device's rates.

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

from rkmate import device as devices
from rkmate.devices import Rates
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.operations import is_view
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.ir.cd import Cost, Kernel
from rkmate.measure.temporaries import bytes_of, temporary_bytes
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


def analytic_costs(partition: Partition) -> dict[int, Cost]:
    """Return the cost of each C node: the larger one of arithmetic and memory traffic, plus a call."""
    alternatives = partition.program.alternatives
    costs: dict[int, Cost] = {}
    for i, node in enumerate(partition.program.operation):
        seconds = seconds_of(node)
        # All kernels of an operation that is not tiled move the same bytes once.
        costs[i] = Cost(seconds, temporary_bytes(node, random=partition.program.cd.c[i].random), tuple(
            Kernel(_seconds_of_tiles(other.target) if isinstance(other.target, Tiled) else seconds,
                   bytes_of(other))
            for other in alternatives.get(node, ())))
    return costs


def seconds_of(node: fx.Node) -> float:
    """Return the counted seconds of an operation."""
    if isinstance(node.target, Tiled):
        return _seconds_of_tiles(node.target)
    rates = _rates(node)
    return rates.seconds(_seconds_of_arithmetic(node, rates), bytes_moved(node))


def bytes_moved(node: fx.Node) -> int:
    """Return bytes of all that an operation reads and makes."""
    return sum(_bytes(n.meta[VALUE]) for n in node.all_input_nodes) + _bytes(node.meta[VALUE])


def _rates(node: fx.Node) -> Rates:
    """Return the rates of the device that an operation runs on."""
    return devices.common(_tensors([n.meta[VALUE] for n in (node, *node.all_input_nodes)])).rates


def _seconds_of_tiles(tiled: Tiled) -> float:
    """Return the seconds of all tiles. Each tile adds to the sums in place, and so reads them."""
    each = sum(seconds_of(n) for n in tiled.graph.nodes if n.op == "call_function" and not is_view(n)
               and n.target is not operator.getitem)
    inside = next(n for n in tiled.graph.nodes if n.op == "call_function")
    return tiled.parts * (each + tiled.sum_bytes() / _rates(inside).bytes_per_second)


def _seconds_of_arithmetic(node: fx.Node, rates: Rates) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is None:
        return _numel(node.meta[VALUE]) / rates.flops_per_second
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
    flops = float(count(*args, **kwargs, out_val=node.meta[VALUE]))
    dtype = str(_tensors([n.meta[VALUE] for n in node.all_input_nodes])[0].dtype).removeprefix("torch.")
    return flops / rates.of_products(dtype, tf32=_may_be_tf32(packet))


def _may_be_tf32(packet: Any) -> bool:
    """Return whether torch's settings let such a product of float32 numbers cut them to 19 bits."""
    if packet in (aten.convolution, aten.convolution_backward):
        return bool(torch.backends.cudnn.allow_tf32)
    return torch.get_float32_matmul_precision() != "highest"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def _numel(value: Any) -> int:
    return sum(math.prod(t.shape) for t in _tensors(value))


def _bytes(value: Any) -> int:
    return sum(math.prod(t.shape) * t.element_size() for t in _tensors(value))
