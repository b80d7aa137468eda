"""Temporary memory of compiled groups, for costs that are estimated and not measured."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.passes.cluster import Cluster
from rkmate.ir.cd import Cost
from rkmate.torch_seam.nodes import VALUE


def with_memory_of_groups(operations: Sequence[fx.Node], costs: Mapping[int, Cost]) -> dict[int, Cost]:
    """Return estimated costs, with the bytes that compiled groups take in addition to their results."""
    return {i: cost._replace(overhead=max(cost.overhead, bytes_of_group(group)))
            if isinstance(group := operations[i].target, Cluster) else cost for i, cost in costs.items()}


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
