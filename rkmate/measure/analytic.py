"""Costs before anything is measured: counted times, and bounds of the temporary memory of operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.devices import Rates
from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.ops.collectives import is_collective, seconds_of_collective
from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes.tiles.tiled import InTiles
from rkmate.ir.cd import HOISTED, CDGraph, Cost, Kernel
from rkmate.measure.temporaries import bytes_of, temporary_bytes
from rkmate.torch_seam.nodes import VALUE, tensors_of
from rkmate.torch_seam.schema import flop_formula, operator_name

Costs = dict[int, Cost]
"""Costs by C node."""


# -- Costs without running: bytes moved and floating-point operations against the device's rates ---

aten = torch.ops.aten


def analytic_costs(partition: Partition) -> dict[int, Cost]:
    """Return the cost of each C node: the larger one of arithmetic and memory traffic, plus a call."""
    alternatives = partition.program.alternatives
    costs: dict[int, Cost] = {}
    for i, node in enumerate(partition.program.operation):
        seconds = seconds_of(node)
        # All kernels of an operation that is not tiled move the same bytes once.
        costs[i] = Cost(seconds, temporary_bytes(node, random=partition.program.cd.c[i].random), tuple(
            Kernel(_seconds_of_tiles(other.target) if isinstance(other.target, InTiles) else seconds,
                   bytes_of(other))
            for other in alternatives.get(node, ())))
    return costs


def seconds_of(node: fx.Node) -> float:
    """Return the counted seconds of an operation."""
    if isinstance(node.target, InTiles):
        return _seconds_of_tiles(node.target)
    if is_collective(node.target):
        args = fx.node.map_arg(node.args, lambda n: n.meta[VALUE])
        return seconds_of_collective(node.target, args, node.meta[VALUE])  # type: ignore[arg-type]
    rates = _rates(node)
    return rates.seconds(_seconds_of_arithmetic(node, rates), bytes_moved(node))


def bytes_moved(node: fx.Node) -> int:
    """Return bytes of all that an operation reads and makes."""
    return sum(_bytes(n.meta[VALUE]) for n in node.all_input_nodes) + _bytes(node.meta[VALUE])


def _rates(node: fx.Node) -> Rates:
    """Return the rates of the device that an operation runs on."""
    return devices.common(tensors_of([n.meta[VALUE] for n in (node, *node.all_input_nodes)])).rates


def _seconds_of_tiles(tiled: InTiles) -> float:
    """Return the seconds of all tiles. Each tile adds to the sums in place, and so reads them."""
    seconds = 0.0
    for graph, times in tiled.graphs():
        each = sum(seconds_of(n) for n in graph.nodes if n.op == "call_function" and not is_view(n)
                   and n.target is not operator.getitem)
        inside = next(n for n in graph.nodes if n.op == "call_function")
        seconds += times * (each + tiled.sum_bytes() / _rates(inside).bytes_per_second)
    return seconds


def _seconds_of_arithmetic(node: fx.Node, rates: Rates) -> float:
    count = flop_formula(node.target)
    if count is None:
        return _numel(node.meta[VALUE]) / rates.flops_per_second
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
    flops = float(count(*args, **kwargs, out_val=node.meta[VALUE]))
    dtype = str(tensors_of([n.meta[VALUE] for n in node.all_input_nodes])[0].dtype).removeprefix("torch.")
    return flops / rates.of_products(dtype, tf32=_may_be_tf32(node.target))


def _may_be_tf32(function: Any) -> bool:
    """Return whether torch's settings let such a product of float32 numbers cut them to 19 bits."""
    if getattr(function, "overloadpacket", None) in (aten.convolution, aten.convolution_backward):
        return bool(torch.backends.cudnn.allow_tf32)
    return torch.get_float32_matmul_precision() != "highest"


def _numel(value: Any) -> int:
    return sum(math.prod(t.shape) for t in tensors_of(value))


def _bytes(value: Any) -> int:
    return sum(math.prod(t.shape) * t.element_size() for t in tensors_of(value))


# -- Find what an operation does in every schedule: its smallest memory, and the input that it overwrites ---

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


# -- Costs before anything is measured: estimated times, and temporary memory between a lower and an upper ---

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
