"""Temporary memory of operations: of torch's CPU kernels, compiled groups, and opaque submodules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.device.protocol import MeterError
from rkmate.device.random_state import STATE_BYTES, unchanged_random_state
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, kind_of, random_state
from rkmate.graph.ops.temporaries import bytes_on_gpu, temporaries_of
from rkmate.graph.passes.fusion import Cluster
from rkmate.graph.passes.tiles.tiled import Alternative, InTiles
from rkmate.ir.cd import Cost
from rkmate.support.warn import warn
from rkmate.torch_seam.nodes import VALUE, tensors_of

# -- Temporary memory of compiled groups, for costs that are estimated and not measured ------------

def with_memory_of_groups(operations: Sequence[fx.Node], costs: Mapping[int, Cost]) -> dict[int, Cost]:
    """Return estimated costs, with the bytes that compiled groups take in addition to their results. Where
    memory is being measured already, a warning says that these bytes are not counted."""
    try:
        return {i: cost._replace(overhead=max(cost.overhead, bytes_of_group(group)))
                if isinstance(group := operations[i].target, Cluster) else cost for i, cost in costs.items()}
    except MeterError as error:
        _warn_of_uncounted("compiled groups", error)
        return dict(costs)


def _warn_of_uncounted(what: str, error: MeterError) -> None:
    warn(f"the temporary memory of {what} cannot be measured now, and comes on top of the budget: {error}. "
         "Make the plan before (call the module once, with arguments of these sizes)")


def bytes_of_group(group: Cluster) -> int:
    """Return the bytes that a group takes in addition to its results; 0 on a GPU of another machine.

    What the compiler keeps between two loops, no rule knows: the group runs once, on ones. Raises
    `CompilerError`.
    """
    return _bytes(group, torch.get_num_threads())


@functools.lru_cache(maxsize=256)
def _bytes(group: Cluster, threads: int) -> int:
    like = [n.meta[VALUE] for n in group.graph.nodes if n.op == "placeholder"]
    device = devices.common(like)
    if device.elsewhere is not None:
        return 0
    tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).fill_(1)
               for t in like]
    group.compile()
    with torch.no_grad():
        if device.first_call_allocates:
            group(*tensors)
        found = device.measure_peak(lambda: group(*tensors), timeline=False)
    results = sum(device.storage_bytes(r.untyped_storage().nbytes()) for r in found.result)
    return max(0, found.peak - results)


# -- Temporary memory of submodules that run as they are, for costs that are estimated and not measured ---

_known: dict[Any, int] = {}


def opaque_bytes(node: fx.Node) -> int | None:
    """Return the bytes that a call of an opaque module takes in addition to its results; None for other
    operations.

    No rule knows what is inside: it runs, on ones, with zeros and with ones as indices (a mask of ones picks
    all rows; as an index, one may be too many).
    """
    if node.target not in (FORWARD, BACKWARD):
        return None
    key = str(node.args[0])
    forms = [(tuple(n.meta[VALUE].shape), n.meta[VALUE].dtype) for n in node.all_input_nodes]
    at = (node.target, kind_of(key), tuple(forms), repr(node.args[3:5]))
    if at not in _known:
        _known[at] = _peak(node, torch.zeros)
        with contextlib.suppress(IndexError, RuntimeError):
            _known[at] = max(_known[at], _peak(node, torch.ones))
    return _known[at]


def is_random_state(node: fx.Node) -> bool:
    """Return whether a value is the state of the generators that a call of an opaque module keeps. It cannot
    be any bytes."""
    made = node.args[0] if node.args else None
    return isinstance(made, fx.Node) and made.target is FORWARD and bool(
        node.args[1] == len(made.meta[VALUE]) - 1)


def _peak(node: fx.Node, integers: Any) -> int:
    def made(n: fx.Node) -> torch.Tensor:
        like = n.meta[VALUE]
        if is_random_state(n):
            return random_state(like.device)
        make = torch.ones if like.is_floating_point() else integers
        result: torch.Tensor = make(tuple(like.shape), dtype=like.dtype, device=like.device)
        return result

    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, made)
    device = devices.common(args[1])
    results = node.meta[VALUE]
    with torch.no_grad(), unchanged_random_state(device):
        peak = device.measure_peak(lambda: target(*args), timeline=False).peak
    kept: int = sum(t.nbytes for t in results)
    return max(0, peak - kept)


# -- Temporary memory inside of torch's operations -------------------------------------------------

_NUMBER = 16
"""A number that is made a tensor, or the intermediate result of a mean."""


def temporary_bytes(node: fx.Node, *, random: bool) -> int:
    """Return the bytes that an operation takes in addition to its results while it runs, if the table knows
    them; 0 on devices other than the CPU, except some operations on GPUs of another machine. `random`:
    whether the operation draws random numbers."""
    if isinstance(node.target, InTiles):
        return tile_bytes(node.target)
    inputs = [v for n in node.all_input_nodes if isinstance(v := n.meta[VALUE], torch.Tensor)]
    outputs = tensors_of(node.meta[VALUE])
    if not all(devices.of(t).cpu_kernels for t in (*inputs, *outputs)):
        here = devices.common((*inputs, *outputs)).elsewhere is None
        return 0 if here else bytes_on_gpu(node.target, inputs)
    try:
        inside = opaque_bytes(node)
    except MeterError as error:
        _warn_of_uncounted("submodules that run as they are", error)
        inside = 0
    if inside is not None:
        return max(STATE_BYTES, inside)
    rule = temporaries_of(node.target)
    return max(STATE_BYTES * random, _NUMBER + (0 if rule is None else rule(inputs, outputs)))


def bytes_of_parts(node: fx.Node) -> int:
    """Return the bytes that an operation takes in addition to its results: a compiled group, or at most one
    of the parts that it works on; 0 for memory that is measured when the operation runs."""
    if isinstance(node.target, Cluster):
        return bytes_of_group(node.target)
    return tile_bytes(node.target) if isinstance(node.target, InTiles) else 0


def bytes_of(other: Alternative) -> int:
    """Return the most bytes that another kernel takes in addition to its results."""
    return tile_bytes(other.target) if isinstance(other.target, InTiles) else other.overhead


def tile_bytes(tiled: InTiles) -> int:
    """Return the bytes that one tile takes in addition to its results, including the temporary memory of its
    operations."""
    return tiled.tile_bytes(lambda n: temporary_bytes(n, random=False))
