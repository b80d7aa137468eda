"""Time and temporary memory of every operation, measured once per class of identical blocks.

Real values flow through the chain block by block, so that integers stay valid indices and no more
than one block is in memory: a model that only fits after rematerialization can be measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.device import Device, PartsMeter
from rkmate.device.random_state import STATE_BYTES, unchanged_random_state
from rkmate.graph.blocks.partition import Block, Partition
from rkmate.graph.capture.capture import Source
from rkmate.graph.capture.eager_kernels import LONGEST_AT_ZERO
from rkmate.graph.passes.simplify import is_view
from rkmate.ir.cd import HOISTED, Cost, Kernel
from rkmate.measure.remembered import CostMemory
from rkmate.measure.settings import MeasureSettings

Costs = dict[int, Cost]
"""By C node."""


def measure(partition: Partition, texts: Sequence[str], sources: Mapping[Source, torch.Tensor],
            memory: CostMemory, settings: MeasureSettings = MeasureSettings(),
            on_progress: Callable[[int, int], None] | None = None) -> Costs:
    """Costs of every C node.

    `texts`: each block's text; blocks with the same text are identical and measured once. `sources`
    gives the tensors that the caller holds. What `memory` knows, measured with equal settings, is not
    measured again.
    """
    device = devices.common(sources.values())
    hoisted = tuple(i for i, b in enumerate(partition.block_of) if b == HOISTED)
    # Which constants are hoisted depends on the whole graph: their key is the text of all blocks.
    beginning = f"{len(hoisted)} hoisted before\n" + "\n".join(texts)
    costs: Costs = {}

    def fill(c: Sequence[int], numbers: Sequence[Cost]) -> None:
        costs.update(zip(c, numbers, strict=True))

    unknown: dict[str, int] = {}
    for block, text in zip(partition.blocks, texts, strict=True):
        if memory.get(text, device, settings, len(block.c)) is None:
            unknown.setdefault(text, block.index)
    known_beginning = memory.get(beginning, device, settings, len(hoisted))
    if unknown or known_beginning is None:
        runner = _Runner(partition, sources, settings, device)
        last = max(unknown.values(), default=-1)
        # The traced operations hold the casts that autocast made.
        with torch.no_grad(), unchanged_random_state(device), \
                torch.autocast(device.autocast_kind, enabled=False):
            runner.hoisted(hoisted)
            if known_beginning is None:
                memory.put(beginning, device, settings, tuple(runner.costs[i] for i in hoisted))
            for number in range(settings.passes):
                runner.start_pass()
                for block in partition.blocks[:last + 1]:
                    if on_progress is not None:
                        on_progress(number * (last + 1) + block.index, settings.passes * (last + 1))
                    runner.block(block, timed=unknown.get(texts[block.index]) == block.index,
                                 metered=number == 0)
            for text, k in unknown.items():
                memory.put(text, device, settings,
                           tuple(runner.costs[i] for i in partition.blocks[k].c))
    found = memory.get(beginning, device, settings, len(hoisted))
    assert found is not None
    fill(hoisted, found)
    for block, text in zip(partition.blocks, texts, strict=True):
        numbers = memory.get(text, device, settings, len(block.c))
        assert numbers is not None
        fill(block.c, numbers)
    return costs


class _Runner:
    """Interprets a partition's operations on real tensors."""

    def __init__(self, partition: Partition, sources: Mapping[Source, torch.Tensor],
                 settings: MeasureSettings, device: Device) -> None:
        self.partition = partition
        self.program = partition.program
        self.cd = self.program.cd
        self.sources = sources
        self.settings = settings
        self.values: dict[int, torch.Tensor] = {}
        self.costs: Costs = {}
        self.known: dict[Any, float] = {}
        self.timed: set[Any] = set()
        """What has been timed in this pass."""
        self.fixed: dict[int, torch.Tensor] = {}
        self.overhead: dict[int, int] = {}
        self.device = device
        self.places: dict[Source, torch.Tensor] = {}
        """What stands for the gradients that the operation at hand adds to."""

    def hoisted(self, nodes: Sequence[int]) -> None:
        """Constants that are computed once at the start, and stay."""
        for i in nodes:
            self.run_timed(i)
        self.fixed = dict(self.values)

    def start_pass(self) -> None:
        """Go back to the first block."""
        self.values = dict(self.fixed)
        self.timed.clear()

    def block(self, block: Block, *, timed: bool, metered: bool) -> None:
        """Run a block; with its backward when it is `timed`, and before that for its temporary memory
        when it is `metered`, too."""
        if timed:
            if metered:
                self._meter(block)
            self._forward(block, self.run_timed, block.c)
            self._backward(block, self.run_timed)
        else:
            self._forward(block, self.run, block.c[:block.graph.loss])
        keep = self.partition.cuts[block.index + 1]
        for j in list(self.values):
            if j not in keep and self._ours(j):
                del self.values[j]

    def _meter(self, block: Block) -> None:
        """The temporary memory of each operation."""
        entering = dict(self.values)
        meter = self.device.parts_meter()
        with meter.running():
            self._forward(block, lambda i: self.run(i, meter), block.c)
            self._backward(block, lambda i: self.run(i, meter))
        for part, peak in meter.peaks().items():
            i = part % len(self.cd.c)
            kept = sum(self.cd.d[j].size for j in self.cd.c[i].outputs)
            # The generator's state is read before and after a random operation.
            least = STATE_BYTES if self.cd.c[i].random else 0
            self.overhead[part] = max(least, peak - kept)
        self.values = entering

    def _forward(self, block: Block, run: Callable[[int], None], readers: Sequence[int]) -> None:
        """`readers`: the C nodes that will run, and need their values."""
        self._run(block, block.c[:block.graph.loss], readers, run)

    def _backward(self, block: Block, run: Callable[[int], None]) -> None:
        nodes = block.c[block.graph.loss:]
        for j in self.partition.grads[block.index + 1]:
            self.values[j] = self._gradient(j)
        self._run(block, nodes, nodes, run)

    def _run(self, block: Block, nodes: Sequence[int], readers: Sequence[int],
             run: Callable[[int], None]) -> None:
        after = self.partition.cuts[block.index + 1]
        last = {j: i for i in readers for j in self.cd.c[i].inputs}
        for i in nodes:
            run(i)
            for j in (*self.cd.c[i].inputs, *self.cd.c[i].outputs):
                if last.get(j, i) == i and j not in after and self._ours(j):
                    self.values.pop(j, None)

    def _ours(self, j: int) -> bool:
        """Whether a storage belongs to a block, and is no hoisted constant."""
        made = self.cd.producer[j]
        return made is None or self.partition.block_of[made] != HOISTED

    def _gradient(self, j: int) -> torch.Tensor:
        like = self.program.owner[j].meta["val"]
        result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return result.normal_(std=1e-2) if like.is_floating_point() or like.is_complex() \
            else result.zero_()

    def value(self, node: fx.Node) -> Any:
        """A tensor, views derived from what holds their storage."""
        where = self.program.storage[node]
        if isinstance(where, Source):
            if where.kind == "grad" and node.op == "placeholder":
                return self.places[where]
            if node.op in ("placeholder", "get_attr"):
                return self.sources[where]
        elif not is_view(node):
            return self.values[where]
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._call(node.args[0])[node.args[1]]
        return self._call(node)

    def _call(self, node: Any) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            return args[0].reshape(args[1])       # as the generated source has it
        return node.target(*args, **kwargs)

    def run(self, i: int, meter: PartsMeter | None = None) -> None:
        """Run a C node."""
        self._make_places(i)
        if meter is None:
            self._keep(i, self._prepared(i)[0]())
            return
        longest = self._at_zero(i)
        if self.device.first_call_allocates:
            self._prepared(i)[0]()       # not a part: what is taken for good is not temporary
        for k, (other, _) in enumerate(self._alternatives(i), 1):
            if self.device.first_call_allocates:
                other()
            with meter.part(self._part(i, k)):
                other()
        # Views that turn out to be copies belong to the operation that takes them.
        with meter.part(i):
            for long in longest:
                long()
            call = self._prepared(i)[0]
            self._keep(i, call())
            del call

    def run_timed(self, i: int) -> None:
        """Run a C node and time it, unless an equal operation has been timed in this pass; the same
        for its other kernels, whose results go at once."""
        self._make_places(i)
        others = self._alternatives(i)
        for other in others:
            if other[1] not in self.timed:
                self._time(*other)
        call, key = self._prepared(i)
        result = call() if key in self.timed else self._time(call, key)
        self._keep(i, result)
        self.costs[i] = Cost(self.known[key], self.overhead.get(i, 0), tuple(
            Kernel(self.known[other], self.overhead.get(self._part(i, k), 0))
            for k, (_, other) in enumerate(others, 1)))

    def _make_places(self, i: int) -> None:
        """Zeros in the place of the gradients that a C node adds to: those of the model stay as they are."""
        self.places.clear()
        for node in self.program.operation[i].all_input_nodes if self.cd.c[i].adds else ():
            where = self.program.storage[node]
            if isinstance(where, Source) and where.kind == "grad":
                self.places[where] = torch.zeros_like(self.sources[Source("param", where.key)])

    def _time(self, call: Callable[[], Any], key: Any) -> Any:
        seconds, result = self._seconds(call)
        self.known[key] = min(seconds, self.known.get(key, seconds))
        self.timed.add(key)
        return result

    def _prepared(self, i: int) -> tuple[Callable[[], Any], Any]:
        node = self.program.operation[i]
        return self._bound(node.target, node.args, node.kwargs)

    def _alternatives(self, i: int) -> list[tuple[Callable[[], Any], Any]]:
        """The other kernels of a C node that works part by part."""
        others = self.program.alternatives.get(self.program.operation[i], ())
        return [self._bound(other.target, other.args, {}) for other in others]

    def _part(self, i: int, kernel: int) -> int:
        """The meter's part for one of them."""
        return kernel * len(self.cd.c) + i

    def _bound(self, target: Any, args: Any, kwargs: Any) -> tuple[Callable[[], Any], Any]:
        args, kwargs = fx.node.map_arg((args, kwargs), self.value)
        return functools.partial(target, *args, **kwargs), _signature(target, args, kwargs)

    def _at_zero(self, i: int) -> list[Callable[[], Any]]:
        """Calls that need as much temporary memory as any, where that depends on values."""
        node = self.program.operation[i]
        target: Any = node.target
        place = LONGEST_AT_ZERO.get(target)
        if place is None:
            return []
        args: list[Any] = [*fx.node.map_arg(node.args, self.value)]
        every, one = torch.zeros_like(args[place]), torch.ones_like(args[place])
        if one.numel():
            one[(-1,) * one.dim()] = 0
        return [functools.partial(target, *args[:place], zeros, *args[place + 1:])
                for zeros in (every, one)]

    def _keep(self, i: int, result: Any) -> None:
        for j in self.cd.c[i].outputs:
            position = self.program.position[j]
            self.values[j] = result if position is None else result[position]

    def _seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        times: list[float] = []
        result = None
        while len(times) < self.settings.repeats and sum(times) < self.settings.enough_seconds:
            result = None                # freed before the call, as its memory may serve again
            seconds, result = self.device.timed(call)
            times.append(seconds)
        return min(times), result


def _signature(target: Any, args: Any, kwargs: Any) -> Any:
    def freeze(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return (tuple(a.shape), a.stride(), a.dtype)
        if isinstance(a, (list, tuple)):
            return tuple(freeze(x) for x in a)
        return repr(a)
    return (target, freeze(args), tuple((k, freeze(v)) for k, v in sorted(kwargs.items())))
