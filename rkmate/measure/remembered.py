"""Known costs: of equal operations in this process, and of blocks kept on disk."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rkmate.device import Device
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, kind_of
from rkmate.graph.ops.properties import is_view, kind_of_number
from rkmate.ir.cd import Cost, Kernel, read_cost
from rkmate.measure.settings import MeasureSettings
from rkmate.support.cache import read_json, store_json
from rkmate.torch_seam.nodes import VALUE

# -- Memories of costs -----------------------------------------------------------------------------
#
# Measured costs, remembered: the same block on the same machine is measured once.
#
# Two plans of one model then rest on the same numbers, so a budget that one of them names as feasible is
# feasible for the other.


FORMAT = 6
"""Raised whenever what is measured changes: entries of another format count as unknown."""
Numbers = tuple[Cost, ...]
"""Costs of the C nodes of a block."""


class CostMemory:
    """Costs of blocks by their text, in memory and in a folder.

    An entry is of one block, one device with its libraries, and one way to measure. Safe under
    concurrent writers: files are replaced whole. A broken entry counts as none, and is written anew.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / "costs"
        self._known: dict[str, Numbers] = {}
        self._operations: dict[str, dict[Hashable, Cost]] = {}

    def operations(self, device: Device, settings: MeasureSettings) -> dict[Hashable, Cost]:
        """Return costs of single operations by their forms: in memory alone, to be read and filled."""
        return self._operations.setdefault(_key("", device, settings), {})

    def get(self, text: str, device: Device, settings: MeasureSettings, count: int) -> Numbers | None:
        """Return the costs of a block of `count` C nodes, or None when it was never measured so."""
        key = _key(text, device, settings)
        if key not in self._known and self._folder is not None:
            found = _numbers(read_json(self._folder / f"{key}.json"), count)
            if found is not None:
                self._known[key] = found
        return self._known.get(key)

    def put(self, text: str, device: Device, settings: MeasureSettings, numbers: Numbers) -> None:
        """Remember the costs of a block."""
        key = _key(text, device, settings)
        self._known[key] = numbers
        if self._folder is not None:
            store_json(self._folder / f"{key}.json", [c.row() for c in numbers])


def _key(text: str, device: Device, settings: MeasureSettings) -> str:
    """Return all that the numbers depend on."""
    content = [FORMAT, text, device.key(), sorted(asdict(settings).items()), torch.__version__,
               torch.get_num_threads(), platform.machine(), torch.get_float32_matmul_precision(),
               torch.are_deterministic_algorithms_enabled()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _numbers(content: Any, count: int) -> Numbers | None:
    try:
        numbers = tuple(read_cost(c) for c in content)
    except (ValueError, TypeError):
        return None
    kernels = [k for c in numbers for k in (Kernel(c.time, c.overhead), *c.alternatives)]
    good = len(numbers) == count and all(k.time >= 0 and k.overhead >= 0 for k in kernels)
    return numbers if good else None


# -- What is known of an operation -----------------------------------------------------------------
#
# Costs of single operations, by what they read and how: what one graph has told serves the next.
#
# Variants of a model's graph are cut into other blocks and have most of their operations in common. One that
# is known is not measured again: that saves time, and variants are compared by the same numbers, whatever
# else the machine did while each was measured.


class KnownOperations:
    """Known costs of the C nodes of one graph."""

    def __init__(self, partition: Partition, known: dict[Hashable, Cost]) -> None:
        """`known`: costs by `form_of` an operation; read and filled."""
        self._operation = partition.program.operation
        self._known = known

    def add(self, nodes: Sequence[int], costs: Sequence[Cost], without: Collection[int] = ()) -> None:
        """Take down the costs of some C nodes; what is known already stays."""
        for i, cost in zip(nodes, costs, strict=True):
            if i not in without:
                self._known.setdefault(form_of(self._operation[i]), cost)

    def of(self, nodes: Iterable[int]) -> dict[int, Cost]:
        """Return the costs of those that are known."""
        found = ((i, self._known.get(form_of(self._operation[i]))) for i in nodes)
        return {i: cost for i, cost in found if cost is not None}


def form_of(node: fx.Node) -> Hashable:
    """Return everything that an operation's cost depends on, as far as its trace knows: the operator, the
    forms of its inputs, and the kinds of floating-point numbers; for views, also of the tensors that they
    look at."""
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
    return kind_of_number(value) if type(value) is float else repr(value)
