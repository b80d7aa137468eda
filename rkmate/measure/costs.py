"""Time and temporary memory of every operation, measured once per class of identical blocks.

The blocks that are not known yet are run one after the other on real values, first for their temporary
memory, then for their times: no more than one block is in memory, so that a model that only fits after
rematerialization can be measured. What lies between them is left out, and so is a long operation that is
like one that was run: the numbers that they would have made are made up. Indices and masks are real.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.device import Device, PartsMeter
from rkmate.device.random_state import STATE_BYTES, unchanged_random_state
from rkmate.errors import DeviceMemoryError
from rkmate.graph.blocks.partition import Block, Partition
from rkmate.graph.capture.captured import Source
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, random_state
from rkmate.graph.ops.collectives import is_collective
from rkmate.graph.ops.properties import RESHAPES, is_view
from rkmate.ir.cd import HOISTED, Cost, Kernel
from rkmate.measure.analytic import Costs, analytic_costs, bytes_alone, surely_over
from rkmate.measure.analytic import hoisted as hoisted_data
from rkmate.measure.made_up import (
    Layout,
    as_made,
    at_most_memory,
    chooses,
    counts_from_one,
    is_empty,
    layout_of,
    made_up,
)
from rkmate.measure.remembered import CostMemory, KnownOperations
from rkmate.measure.runs import Caches, Timings, as_in_a_step, copied_forms, made_just_before, signature
from rkmate.measure.settings import MeasureSettings
from rkmate.measure.temporaries import is_random_state, temporary_bytes
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import quickest
from rkmate.torch_seam.schema import OpOverload

LONG = 1e-3
"""Seconds, counted: an operation that takes this long is not run again only for what it makes."""


def measure(partition: Partition, texts: Sequence[str], sources: Mapping[Source, torch.Tensor],
            memory: CostMemory, settings: MeasureSettings = MeasureSettings(),
            on_progress: Callable[[int, int], None] | None = None,
            limit: Callable[[], int] | None = None, step_bytes: int = 0) -> Costs:
    """Measure the costs of every C node.

    `texts`: each block's text; blocks with the same text are identical and measured once. `sources`
    gives the tensors that the caller holds. What `memory` knows, measured with equal settings, is not
    measured again: whole blocks, and single operations of others. `limit`: asked for the bytes that measuring
    may take, if anything is to be measured. Values that have no room are made up again when they are read; an
    operation that has no room by itself (no schedule within the limit has one for it) is not run, its cost is
    counted, and not remembered. `step_bytes`: what goes through the caches in a step.
    """
    device = devices.common(sources.values())
    settings = as_in_a_step(settings, device, step_bytes)
    hoisted = tuple(i for i, b in enumerate(partition.block_of) if b == HOISTED)
    beginning = text_of_beginning(len(hoisted), texts)
    found: dict[str, tuple[Cost, ...]] = {}
    unknown: dict[str, Block] = {}
    operations = KnownOperations(partition, memory.operations(device, settings))
    first: dict[str, Block] = {}
    for block, text in zip(partition.blocks, texts, strict=True):
        first.setdefault(text, block)
    for text, block in first.items():
        numbers = memory.get(text, device, settings, len(block.c))
        if numbers is None:
            unknown[text] = block
        else:
            found[text] = numbers
            operations.add(block.c, numbers)
    known_beginning = memory.get(beginning, device, settings, len(hoisted))
    if unknown or known_beginning is None:
        known = {**operations.of(i for block in unknown.values() for i in block.c),
                 **_of_collectives(partition)}
        runner = _Runner(partition, sources, settings, device, None if limit is None else limit(), known)
        last = max((b.index for b in unknown.values()), default=-1)
        walks = 1 + settings.passes * settings.repeats
        with _as_traced(device):
            runner.hoisted(hoisted)
            if known_beginning is None:
                known_beginning = tuple(runner.cost(i) for i in hoisted)
                memory.put(beginning, device, settings, known_beginning)
            for number in range(walks):
                if number == 1:
                    runner.share(unknown, texts)
                runner.start_walk(number)
                for block in partition.blocks[:last + 1]:
                    if on_progress is not None:
                        on_progress(number * (last + 1) + block.index, walks * (last + 1))
                    runner.block(block, asked=unknown.get(texts[block.index]) is block)
        for text, block in unknown.items():
            found[text] = tuple(map(runner.cost, block.c))
            if runner.left_out.isdisjoint(block.c):
                memory.put(text, device, settings, found[text])
            operations.add(block.c, found[text], without=runner.left_out)
    assert known_beginning is not None
    costs: Costs = dict(zip(hoisted, known_beginning, strict=True))
    for block, text in zip(partition.blocks, texts, strict=True):
        costs.update(zip(block.c, found[text], strict=True))
    if any(n.target in (FORWARD, BACKWARD) for n in partition.program.operation):
        runner = _Runner(partition, sources, settings, device, None, {})
        with _as_traced(device):
            runner.hoisted(hoisted)
            inside = runner.opaque_bytes()
        costs |= _with_opaque_bytes(partition, texts, costs, inside)
    return costs


@contextlib.contextmanager
def _as_traced(device: Device) -> Iterator[None]:
    """Run traced operations inside the context, which hold the casts that autocast made."""
    with torch.no_grad(), unchanged_random_state(device), torch.autocast(device.autocast_kind, enabled=False):
        yield


def _with_opaque_bytes(partition: Partition, texts: Sequence[str], costs: Costs, inside: Mapping[int, int]
                       ) -> Costs:
    """Return costs of the C nodes that take the bytes `inside` of opaque submodules. Blocks with one text are
    planned as one, for the most that any of them takes."""
    places = {i: (text, k) for block, text in zip(partition.blocks, texts, strict=True)
              for k, i in enumerate(block.c) if i in inside}
    most: dict[tuple[str, int], int] = {}
    for i, place in places.items():
        most[place] = max(inside[i], most.get(place, 0))
    return {i: costs[i]._replace(overhead=most[place]) for i, place in places.items()}


def _of_collectives(partition: Partition) -> Costs:
    """Return the estimated costs of what communicates: it never runs on one rank alone."""
    nodes = [i for i, n in enumerate(partition.program.operation) if is_collective(n.target)]
    return {i: cost for i, cost in analytic_costs(partition).items() if i in nodes} if nodes else {}


def text_of_beginning(hoisted: int, texts: Sequence[str]) -> str:
    """Return the text under which the costs of hoisted constants are remembered: which constants these are
    depends on all blocks."""
    return f"{hoisted} hoisted before\n" + "\n".join(texts)


class _Runner:
    """Interprets a partition's operations on real tensors."""

    def __init__(self, partition: Partition, sources: Mapping[Source, torch.Tensor],
                 settings: MeasureSettings, device: Device, limit: int | None, known: Costs) -> None:
        self.partition, self.program = partition, partition.program
        self.cd = self.program.cd
        self.sources = sources
        self.limit = limit
        self.known = known          # C nodes that need not be measured
        self.values: dict[int, torch.Tensor] = {}
        self.made: dict[int, Layout] = {}
        """Layouts of the D nodes that an operation has made: not always those of its trace."""
        self.fixed: dict[int, torch.Tensor] = {}
        self.device = device
        self.metering = True
        """Whether this is the first walk over the blocks, which measures memory; the others measure times."""
        self.places: dict[Source, torch.Tensor] = {}
        """Gradients that the current C node adds to."""
        self.keys: dict[int, Any] = {}
        """The key under which each C node's operation is timed (other kernels: see `_others`)."""
        self.timings = Timings(device, settings)
        self.caches = Caches(device) if settings.cold else None
        if self.caches is not None and limit is not None:
            self.caches.tell_if_over(limit)
        self.overhead: dict[int, int] = {}
        self.peaks: dict[Any, int] = {}
        """Temporary memory and results of an operation, by what it is known by, and what is copied for it."""
        self.left_out: set[int] = set()
        """C nodes that have no room within the limit, or one of whose other kernels has none."""
        self.constants = hoisted_data(partition)
        self.over: int | None = None
        """The D node whose place the result of the operation at hand takes."""

    def hoisted(self, nodes: Sequence[int]) -> None:
        """Compute the constants that are computed once at the start, and keep them."""
        for i in nodes:
            self.run_timed(i)
        self.fixed = dict(self.values)

    def share(self, unknown: Mapping[str, Block], texts: Sequence[str]) -> None:
        """Decide how often each operation is timed, after the first walk. `unknown`: a block of each text
        that is measured; `texts`: of all blocks."""
        often: Counter[Any] = Counter()
        step = 0.0
        for text, times in Counter(text for text in texts if text in unknown).items():
            for i in unknown[text].c:
                if i not in self.known:
                    step += self.cost(i).time * times
                    for part in (i, *self._others(i)):
                        if part in self.keys:
                            often[self.keys[part]] += times
        self.timings.share(step, often)

    def start_walk(self, number: int) -> None:
        """Go back to the first block."""
        self.metering = number == 0
        self.values = dict(self.fixed)
        self.timings.start_walk(number - 1)

    def cost(self, i: int) -> Cost:
        """Return the cost of a C node, from all of its runs."""
        if i in self.known:
            return self.known[i]
        if i not in self.keys:
            counted = self._counted[i]
            return Cost(counted.time * self._pace, counted.overhead, tuple(
                Kernel(k.time * self._pace, k.overhead) for k in counted.alternatives))
        return Cost(self.timings.seconds(self.keys[i]), self.overhead.get(i, 0), tuple(
            Kernel(self.timings.seconds(self.keys[part]), self.overhead.get(part, 0))
            for part in self._others(i) if part in self.keys))

    @property
    def _pace(self) -> float:
        """Seconds of this machine for an estimated second."""
        ran = [i for i in self.keys if i < len(self.cd.c)]
        counted = sum(self._counted[i].time for i in ran)
        return sum(self.timings.seconds(self.keys[i]) for i in ran) / counted if counted else 1.0

    @functools.cached_property
    def _counted(self) -> Costs:
        return analytic_costs(self.partition)

    def block(self, block: Block, *, asked: bool) -> None:
        """Run a block for its costs, if they are `asked` for and not known well enough; else for the indices
        and masks that later blocks read, if it makes any."""
        leaving = self.partition.cuts[block.index + 1]
        if asked and self.metering:
            self._meter(block)
        elif asked and any(self.timings.wanted(self.keys[part]) for i in block.c
                           for part in (i, *self._others(i)) if part in self.keys):
            self._begin(block.c[:block.graph.loss])
            self._forward(block, self.run_timed, block.c)
            self._begin(block.c[block.graph.loss:])
            self._backward(block, self.run_timed)
        elif any(self._chooses(j) for i in block.c for j in self.cd.c[i].outputs if j in leaving):
            self._forward(block, self.run, block.c[:block.graph.loss])
        self._leave(block)

    def _begin(self, nodes: Sequence[int]) -> None:
        """Before the forward or the backward of a block: make up what it reads, and empty the caches."""
        if self.caches is None or not nodes:
            return
        made = {j for i in nodes for j in self.cd.c[i].outputs}
        for j in sorted({j for i in nodes for j in self.cd.c[i].inputs} - made - self.values.keys()):
            if self.limit is None or self._level() + self.cd.d[j].size <= self.limit:
                self._held(j)
        self._empty_caches(nodes[0])

    def _empty_caches(self, i: int) -> None:
        """Empty the caches, except for what was made just before a C node."""
        if self.caches is not None:
            self.caches.empty([self.values[j] for j in made_just_before(self.cd, i) if j in self.values])

    def _leave(self, block: Block) -> None:
        """Let go of the values that no later block reads."""
        for j in list(self.values):
            if j not in self.partition.cuts[block.index + 1] and self._ours(j):
                del self.values[j]

    def _meter(self, block: Block) -> None:
        """Measure the temporary memory of each operation."""
        meter = self.device.parts_meter()
        self.metered: dict[int, Any] = {}
        _ = self._counted           # computed now: for opaque calls it measures memory, too
        with meter.running():
            self._forward(block, lambda i: self.run(i, meter), block.c)
            self._backward(block, lambda i: self.run(i, meter))
        for part, peak in meter.peaks().items():
            self.peaks[self.metered[part]] = max(peak, self.peaks.get(self.metered[part], 0))
        for part, key in self.metered.items():
            i, (*_, in_place) = part % len(self.cd.c), key
            kept = sum(self.cd.d[j].size for j in self.cd.c[i].outputs) - in_place
            # The generator's state is read before and after a random operation: it is bytes of the host.
            least = STATE_BYTES if self.cd.c[i].random and self.device.host else 0
            if key in self.peaks:
                self.overhead[part] = max(least, self.peaks[key] - kept)

    def _forward(self, block: Block, run: Callable[[int], None], readers: Sequence[int]) -> None:
        """Run a block's forward. `readers`: C nodes that will run later and need its values."""
        self._run(block, block.c[:block.graph.loss], readers, run)

    def _backward(self, block: Block, run: Callable[[int], None]) -> None:
        nodes = block.c[block.graph.loss:]
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
        """Return whether a storage belongs to a block, and is no hoisted constant."""
        made = self.cd.producer[j]
        return made is None or self.partition.block_of[made] != HOISTED

    def _chooses(self, j: int) -> bool:
        return chooses(self.program.owner[j].meta[VALUE])

    def _held(self, j: int) -> torch.Tensor:
        """Return the value of a D node, made up where it is not there."""
        if j not in self.values:
            owner = self.program.owner[j]
            value = random_state(owner.meta[VALUE].device) if is_random_state(owner) else \
                made_up(owner.meta[VALUE], self.cd.d[j].kind, from_one=counts_from_one(owner))
            self.values[j] = as_made(value, self.made[j]) if j in self.made else value
        return self.values[j]

    def _level(self) -> int:
        """Return bytes that are held."""
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.values.values())}
        return sum(self.device.storage_bytes(size) for size in storages.values())

    def _fits(self, i: int) -> bool:
        """Make room for a C node; False where there is none even when it is alone."""
        self.over = surely_over(self.program, i, self._ours)
        if self.limit is None:
            return True
        node, operation = self.cd.c[i], self.program.operation[i]
        alone = bytes_alone(self.cd, i, self.constants)
        if alone > self.limit:
            self.left_out.add(i)
            return False
        missing = sum(self.cd.d[j].size for j in {*node.inputs, *node.outputs} if j not in self.values)
        # Its temporary memory is unknown before its first run: assume two copies of all of it.
        missing += max(self.overhead.get(i, 2 * alone), temporary_bytes(operation, random=node.random))
        others = [j for j in self.values if j not in node.inputs and self._ours(j)]
        for j in sorted(others, key=lambda j: (self._chooses(j), -self.cd.d[j].size)):
            if self._level() + missing <= self.limit:
                break
            del self.values[j]
        if self.over is None and self._level() + missing > self.limit:
            self.over = next((j for j in self.program.in_place.get(operation, ()) if self._ours(j)), None)
        return True

    def value(self, node: fx.Node) -> Any:
        """Return a node's tensor; views are derived from the tensor that holds their storage."""
        where = self.program.storage[node]
        if isinstance(where, Source):
            if node.op in ("placeholder", "get_attr"):
                return self.places[where] if where in self.places else self.sources[where]
        elif not is_view(node):
            return self._held(where)
        if not isinstance(node.target, OpOverload):
            return self._call(node.args[0])[node.args[1]]
        return self._call(node)

    def _call(self, node: Any) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        if node.target in RESHAPES:
            return args[0].reshape(args[1])       # as the generated source has it
        return node.target(*args, **kwargs)

    def _is_known(self, i: int) -> bool:
        """Return whether a C node need not be measured: its results are then made up, unless they are
        choices."""
        if i in self.known and any(map(self._chooses, self.cd.c[i].outputs)) \
                and not is_collective(self.program.operation[i].target) and self._fits(i):
            self._keep(i, self._prepared(i)[0]())
        return i in self.known

    def run(self, i: int, meter: PartsMeter | None = None) -> None:
        """Run a C node."""
        if self._is_known(i) or not self._fits(i):
            return
        if meter is None:
            self._keep(i, self._prepared(i)[0]())
            return
        self._make_places(i)
        others = self._alternatives(i)
        for part, (_, other_key) in others.items():
            self.keys[part], self.metered[part] = other_key, (other_key, (), 0)
        call, key = self._prepared(i)
        self.keys[i] = key
        over = 0 if self.over is None else self.cd.d[self.over].size
        self.metered[i] = (key, copied_forms(call, self._storages(i)), over)
        if all(self.metered[part] in self.peaks for part in (i, *others)) and self._passed_over(i):
            return
        longest = at_most_memory(self.program.operation[i], self.value)
        if self.device.first_call_allocates:
            call()                       # not a part: what is taken for good is not temporary
        del call                         # nor are the copies that it holds
        for part, other in others.items():
            if self.device.first_call_allocates:
                other[0]()
            with meter.part(part):
                self.timings.clock(*other)
        del others
        # Views that turn out to be copies belong to the operation that takes them.
        with meter.part(i):
            for long in longest:
                long()
            call = self._prepared(i)[0]
            self._keep(i, self.timings.clock(call, key))
            del call

    def opaque_bytes(self) -> dict[int, int]:
        """Measure the bytes that calls of opaque modules take in addition to their results.

        They depend on values (on the rows that an expert picks), so one forward runs, on real values. None of
        these is made up again, whatever the limit: with two budgets, the calls see the same rows. In memory
        are what the rest of the forward reads, and what one block's calls read.
        """
        meter = self.device.parts_meter()
        self.start_walk(0)

        def is_opaque(i: int) -> bool:
            return self.program.operation[i].target in (FORWARD, BACKWARD)

        def run(i: int) -> None:
            if not is_opaque(i):
                if i < self.cd.loss:
                    self.run(i)
            elif self._fits(i):
                if self.device.first_call_allocates:
                    self._prepared(i)[0]()
                with meter.part(i):
                    self._keep(i, self._prepared(i)[0]())

        with meter.running():
            for block in self.partition.blocks:
                self._forward(block, run, [i for i in block.c if i < self.cd.loss or is_opaque(i)])
                self._backward(block, run)
                self._leave(block)
        return {i: max(STATE_BYTES, peak - sum(self.cd.d[j].size for j in self.cd.c[i].outputs))
                for i, peak in meter.peaks().items()}

    def run_timed(self, i: int) -> None:
        """Run a C node and time it, unless an equal operation has been timed often enough; the same
        for its other kernels, whose results go at once."""
        if self._is_known(i) or not self._fits(i):
            return
        self._make_places(i)
        others_ran = False
        for other in self._alternatives(i).values():
            if self.timings.wanted(other[1]):
                self._empty_caches(i)
                self.timings.time(*other)
                others_ran = True
        if others_ran:
            self._empty_caches(i)
        call, self.keys[i] = self._prepared(i)
        if self.timings.wanted(self.keys[i]):
            self._keep(i, self.timings.time(call, self.keys[i]))
        elif not self._passed_over(i):
            self._keep(i, call())

    def _passed_over(self, i: int) -> bool:
        """Return whether an operation takes long, and makes no choices: then what it makes is made up."""
        return self._counted[i].time >= LONG and not any(map(self._chooses, self.cd.c[i].outputs))

    def _prepared(self, i: int) -> tuple[functools.partial[Any], Any]:
        node = self.program.operation[i]
        call, key = self._bound(node.target, node.args, node.kwargs)
        if self.over is not None:
            way = self.program.in_place[node][self.over]
            args = list(call.args)
            kwargs = call.keywords | ({} if way.keyword is None else {way.keyword: args[way.argument]})
            args[:2] = reversed(args[:2]) if way.swapped else args[:2]
            call = functools.partial(quickest(way.target), *args, **kwargs)
        return call, key

    def _alternatives(self, i: int) -> dict[int, tuple[Callable[[], Any], Any]]:
        """Return the other kernels of a C node, by their parts of the meter. Those that have no room within
        the limit are left out, and with them those after them, which take more."""
        found: dict[int, tuple[Callable[[], Any], Any]] = {}
        kernels = self.program.alternatives.get(self.program.operation[i], ())
        for part, other in zip(self._others(i), kernels, strict=True):
            if self.limit is not None:
                values = self.cd.bytes({*self.cd.c[i].inputs, *self.cd.c[i].outputs, *self.constants})
                if self.limit < values + max(other.overhead, self.overhead.get(part, values)):
                    self.left_out.add(i)
                    break
            found[part] = self._bound(other.target, other.args, {})
        return found

    def _others(self, i: int) -> range:
        """Return the meter's parts for the other kernels of a C node."""
        count = len(self.program.alternatives.get(self.program.operation[i], ()))
        return range(len(self.cd.c) + i, (count + 1) * len(self.cd.c) + i, len(self.cd.c))

    def _make_places(self, i: int) -> None:
        """Make zeros instead of the gradients that a C node adds to: the model's gradients stay unchanged."""
        self.places.clear()
        for node in self.program.operation[i].all_input_nodes if self.cd.c[i].adds else ():
            where = self.program.storage[node]
            if isinstance(where, Source) and where.kind == "grad":
                self.places[where] = torch.zeros_like(self.sources[Source("param", where.key)])

    def _bound(self, target: Any, args: Any, kwargs: Any) -> tuple[functools.partial[Any], Any]:
        args, kwargs = fx.node.map_arg((args, kwargs), self.value)
        return functools.partial(quickest(target), *args, **kwargs), signature(target, args, kwargs)

    def _storages(self, i: int) -> set[int]:
        """Return the addresses of the storages that a C node reads."""
        places = [self.program.storage[n] for n in self.program.reads(i)]
        return {(self.values[p] if isinstance(p, int) else self.sources[p]).untyped_storage().data_ptr()
                for p in places if p in self.values or p in self.sources}

    def _keep(self, i: int, result: Any) -> None:
        if self.over is not None:
            self.values.pop(self.over, None)     # another value stands there now
        for j in self.cd.c[i].outputs:
            position = self.program.position[j]
            self.values[j] = result if position is None else result[position]
            self.made[j] = layout_of(self.values[j])
            if is_empty(self.program.owner[j]):
                del self.values[j]


# -- Measuring within the memory that there is -----------------------------------------------------
#
# Measuring on a device that others have filled: with what is free, or an error that says what to do.


PART_OF_FREE = 0.8
"""Part of free memory that measuring may take after it has run out of memory: an operation may take more than
is known before it has run."""


def measured_within(measure: Callable[[Callable[[], int] | None], Costs], limit: Callable[[], int] | None,
                    device: torch.device, name: str) -> Costs:
    """Return the result of `measure`, which gets the number of bytes that it may take. If the device has less
    free memory, measure once more with a smaller number. `name`: of the model.

    Raises:
        DeviceMemoryError: too little is free even for single operations.
    """
    try:
        return measure(limit)
    except torch.OutOfMemoryError:
        pass                # left first: the error holds the values of what ran
    place = devices.of(device)
    place.give_back()
    memory = place.memory()
    free = 0 if memory is None else memory.free + memory.cached
    wanted = None if limit is None else limit()
    less = int(PART_OF_FREE * free)
    try:
        return measure(lambda: less if wanted is None else min(less, wanted))
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"there is too little memory on {device} to measure the operations of {name}: {free:,} bytes are "
            'free. Free some (other models, other processes), count costs (Settings(costs="analytic")), or '
            "plan on an emptier device, save the plan and give it to wrap (plan=)") from error
