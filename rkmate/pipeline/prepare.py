"""The stages before a search, one value each: a model is traced, cut into blocks, compiled on request, and
measured."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from rkmate import device as devices
from rkmate.device import MeterError
from rkmate.device.inductor import check_compiler, try_compiler
from rkmate.device.inductor import version as compiler_version
from rkmate.errors import ArgumentError, CaptureError, CompilerError, RkmateError
from rkmate.graph.blocks.identity import block_infos, block_texts, classes_of, module_of
from rkmate.graph.blocks.lower import Program, lower
from rkmate.graph.blocks.order import reordered
from rkmate.graph.blocks.partition import Partition, Stages, cut_stages, partition
from rkmate.graph.blocks.wishes import Wishes, check_names, wishes_of
from rkmate.graph.capture.captured import Capture, Source
from rkmate.graph.capture.structure import owner_name, take_apart, tensor_called
from rkmate.graph.passes.fusion import Cluster
from rkmate.graph.passes.once import unrepeatable
from rkmate.graph.passes.table import simplify
from rkmate.graph.sizes.again import capture, once_of
from rkmate.ir.cd import CDGraph, Cost
from rkmate.ir.kernels import choose_kernels
from rkmate.ir.link import Link
from rkmate.ir.plan import BlockInfo, Origin
from rkmate.ir.recompute import checkpointed
from rkmate.ir.schedule import Schedule, save_all
from rkmate.ir.simulate import Simulation, peak_of_calls, simulate
from rkmate.measure.analytic import Costs, analytic_costs
from rkmate.measure.costs import measure, measured_within
from rkmate.measure.remembered import CostMemory
from rkmate.measure.runs import touched_bytes
from rkmate.measure.settings import MeasureSettings
from rkmate.measure.temporaries import with_memory_of_groups
from rkmate.offload.target import link_of
from rkmate.pipeline.elsewhere import as_there
from rkmate.pipeline.loss import ModelAndLoss, how_to_train, traceable, trained_outputs, trains_of
from rkmate.pipeline.model import origin_of, refuse_gradients_in_place
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS, Concerned, Variant, first, settings_that_keep
from rkmate.planners.overlap import exposed, overlapped
from rkmate.support.cache import cache_folder
from rkmate.support.planning_lock import capture_lock, gc_pause, planning_lock
from rkmate.support.progress import Progress
from rkmate.support.warn import warn
from rkmate.torch_seam.modules import buffers_by_path, original_of, parameters_by_path, submodules_of
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.patches.autograd import region_of
from rkmate.torch_seam.tensors import read_directly

# -- Traced, blocked, prepared ---------------------------------------------------------------------
#
# From a model to its graph in blocks, with costs: capture, passes, lower, partition, costs. Each stage takes
# what the one before returns; only this package knows their order.

Measured = Callable[["Blocked", Callable[[], Costs]], Costs]
"""Calls what measures a graph on this rank, on all ranks at once, and returns the costs of the slowest."""
LEAST_SECONDS = 0.1
"""Seconds that a search gets if the capture has used up the time: for a first plan."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A captured model: what every variant of its graph, every loss and every budget begin from."""

    name: str
    """Name of the model's class."""
    capture: Capture
    wanted: tuple[bool, ...]
    """For each output, whether its gradient will come."""
    tensors: Mapping[Source, torch.Tensor]
    """The caller's tensors. Costs are measured on them."""
    device: torch.device
    children: frozenset[str]
    """Names of the children, where the model is an `nn.Sequential`."""
    settings: Settings
    progress: Progress
    seconds: float
    """Seconds of the capture."""
    origin: Origin
    """A description of what was captured, for people to read."""
    prefix: str = ""
    """The prefix that names of modules have in the capture, but not in the user's model."""
    outside: int = 0
    """Bytes that the caller makes of the outputs, and holds during the backward, if a step has shown some."""
    measured_by: Measured | None = None
    """Measures on all ranks at once; None: this one alone measures."""
    until: float = math.inf
    """When planning should be over, by `time.perf_counter`; infinite where only its searches have a limit."""

    def timed(self) -> Traced:
        """Return a copy that is planned within ``planning_seconds``, which its capture counts to."""
        seconds = self.settings.planning_seconds
        return self if seconds is None else replace(self, until=time.perf_counter() + seconds - self.seconds)

    def with_deferred(self, outputs: Literal["auto", "never"]) -> Traced:
        """Return a copy that defers outputs to their first read, or whose steps compute them all."""
        return replace(self, settings=replace(self.settings, deferred_outputs=outputs))

    @property
    def is_late(self) -> bool:
        """Whether the time of planning is over."""
        return time.perf_counter() >= self.until

    @property
    def seconds_left(self) -> float | None:
        """Seconds that a search may take, `LEAST_SECONDS` at least; None: as long as the planner likes."""
        if math.isinf(self.until):
            return self.settings.planning_seconds
        return max(LEAST_SECONDS, self.until - time.perf_counter())


@dataclass(frozen=True, eq=False)
class Blocked:
    """A variant of a graph, cut into blocks."""

    traced: Traced
    variant: Variant
    partition: Partition
    texts: tuple[str, ...]
    """Text of each block: identical blocks have equal texts."""
    classes: tuple[int, ...]
    """For each block, the number of its text."""
    fingerprint: str
    """Fingerprint of the graph: a plan serves every model with an equal one."""
    nodes: Mapping[str, int]
    """Node counts before and after simplification."""
    stage_seconds: Mapping[str, float]
    wishes: Wishes = Wishes()
    """The user's, for the graph's data."""

    @property
    def concerned(self) -> Concerned:
        """Per name of a variant, the weights that it concerns in this model."""
        return self.partition.program.joint.concerned


class AsCheckpointed(NamedTuple):
    """A step as a program checkpoints it."""

    peak: int
    """Bytes, of as many calls as the settings say."""
    seconds: float
    """Seconds of one call."""
    regions: int
    """Number of checkpointed regions in the program."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model's graph with costs, shared by all budgets."""

    blocked: Blocked
    costs: Costs
    graph: CDGraph
    """The whole graph with costs."""
    whole: Schedule
    """The step without rematerialization, its kernels chosen."""
    baseline: Simulation
    """The simulator's verdict on it."""
    infos: tuple[BlockInfo, ...]
    """Descriptions of the blocks, without the number of their options."""
    stage_seconds: Mapping[str, float]

    @property
    def capture(self) -> Capture:
        """The captured model."""
        return self.blocked.traced.capture

    @property
    def partition(self) -> Partition:
        """The program cut into blocks."""
        return self.blocked.partition

    @property
    def settings(self) -> Settings:
        """The settings of the call."""
        return self.blocked.traced.settings

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.blocked.traced.device

    @functools.cached_property
    def beside(self) -> int:
        """Bytes in memory during the planned step that are not part of it: values of inputs that are computed
        before the step, what is kept to undo a forward or to run it again, and what the caller holds."""
        recipe, undone = self.capture.recipe, self.capture.effects.answers
        kept = sum(n.meta[VALUE].nbytes for _, n in self.capture.mutations) if undone else 0
        if sum(self.capture.differentiable) > 1:
            kept += sum(n.meta[VALUE].nbytes for n in unrepeatable(self.partition.program.joint))
        return kept + (0 if recipe is None else recipe.bytes) + self.blocked.traced.outside

    @functools.cached_property
    def searched(self) -> CDGraph:
        """The graph that planners search: of collectives that `overlapped` can hide, only the time that is
        likely to stay exposed."""
        if self.settings.calls != 1 or self.graph.link is not None:
            return self.graph
        return exposed(self.graph, [b.c for b in self.partition.blocks])

    @functools.cached_property
    def of_graph(self) -> dict[Hashable, object]:
        """Results that planners have computed from the `searched` graph alone (`Problem.once_of_graph`)."""
        return {}

    def with_kernels(self, schedule: Schedule, room: int = 0) -> Schedule:
        """Return the schedule with the fastest kernels that leave its peak, or are within `room` bytes."""
        return choose_kernels(self.graph, schedule, room=room, known=self._verdict(schedule))

    def overlapped(self, schedule: Schedule, limit: int) -> Schedule:
        """Return the schedule with collectives that run while something else computes, within `limit`
        bytes."""
        if self.settings.calls != 1:
            return schedule
        return overlapped(self.graph, schedule, limit)

    def peak(self, schedule: Schedule, calls: int) -> int:
        """Return the simulated peak, in bytes, of a step of `calls` calls that follow a schedule."""
        return self.simulate(schedule).peak if calls == 1 else peak_of_calls(self.graph, schedule, calls)

    def after(self, seconds: float) -> Prepared:
        """Return a copy whose 'measure' stage is longer by `seconds`."""
        return self if not seconds else replace(self, stage_seconds={
            **self.stage_seconds, "measure": self.stage_seconds["measure"] + seconds})

    @functools.cached_property
    def class_graphs(self) -> tuple[CDGraph, ...]:
        """For each class of blocks, the graph of its first block, with costs."""
        first = {k: b for b, k in reversed(list(enumerate(self.blocked.classes)))}
        blocks = [self.partition.blocks[first[k]] for k in range(len(first))]
        return tuple(b.graph.with_costs(self.searched.c[i] for i in b.c) for b in blocks)

    @functools.cached_property
    def baseline_peak(self) -> int:
        """Peak, in bytes, of the step without rematerialization, of as many calls as the settings say."""
        return self.peak(self.whole, self.settings.calls)

    @property
    def own_peak(self) -> int:
        """Bytes of the step without rematerialization, with what is in memory next to it."""
        return self.baseline_peak + self.beside

    @functools.cached_property
    def regions(self) -> tuple[int | None, ...]:
        """For each C node, the region that the program checkpoints it in, or None; empty if the program
        checkpoints nothing."""
        found = tuple(region_of(node) if i < self.graph.loss else None
                      for i, node in enumerate(self.partition.program.operation))
        return found if any(r is not None for r in found) else ()

    @functools.cached_property
    def as_checkpointed(self) -> AsCheckpointed | None:
        """The simulator's verdict on the step as the program checkpoints it; None where it does not."""
        if not self.regions:
            return None
        schedule = self.with_kernels(checkpointed(self.graph, self.regions))
        return AsCheckpointed(self.peak(schedule, self.settings.calls), self.simulate(schedule).seconds,
                              len(set(self.regions) - {None}))

    def simulate(self, schedule: Schedule) -> Simulation:
        """Return the simulator's verdict on a schedule of this model."""
        found = self._verdict(schedule)
        if found is None:
            found = simulate(self.graph, schedule)
            self._verdicts[1:] = [(schedule, found)]
        return found

    def _verdict(self, schedule: Schedule) -> Simulation | None:
        return next((r for s, r in self._verdicts if s is schedule), None)

    @functools.cached_property
    def _verdicts(self) -> list[tuple[Schedule, Simulation]]:
        """Verdicts on the whole step and on the latest schedule: callers ask for each several times."""
        return [(self.whole, self.baseline)]


@planning_lock
def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings,
          progress: Progress, captured: Capture | None = None) -> Traced:
    """Capture a model on sample inputs; one thread at a time. `captured`: what is known to come out."""
    check_model(model)
    model = traceable(model)
    prefix = "model." if isinstance(model, ModelAndLoss) else ""
    check_names(model, settings.pins, prefix)
    if settings.gradients == "in_place":
        refuse_gradients_in_place(model)
    start = time.perf_counter()
    arguments, _ = take_apart((args, kwargs), result=False)
    device = devices.common((*model.parameters(), *arguments))
    settings = with_compiler(settings, device.torch_device)
    if settings.offload is not None:
        settings.offload.check(device)
    if captured is None:
        then = "searching" if settings.costs == "analytic" else "measuring and searching"
        with gc_pause(), progress.stage("capturing", None, then=then), capture_lock:
            captured = capture(model, args, kwargs, settings.opaque)
    settings = settings_that_keep(settings, captured)
    trains = trains_of(model, captured, settings.trains)
    if not any(captured.differentiable):
        raise ArgumentError(f"{type(model).__name__}: no output depends on a parameter or input that "
                            f"requires a gradient, so there is nothing to train. {how_to_train(model)}")
    if device.elsewhere is not None:
        captured = as_there(captured, device.torch_device)
    return Traced(type(model).__name__, captured, trained_outputs(captured, trains),
                  held_tensors(captured, model, captured.given(arguments)), device.torch_device,
                  _children(model), settings, progress, time.perf_counter() - start,
                  origin_of(model, args, kwargs), prefix)


@planning_lock
def block(traced: Traced, variant: Variant | None = None) -> Blocked:
    """Rewrite a captured graph, and cut it into blocks. `variant`: the settings' first unless given."""
    start = middle = time.perf_counter()
    variant = variant or first(traced.settings)
    choices, cut = choices_of(variant, traced.settings), traced.settings.cut

    def make() -> tuple[Partition, tuple[str, ...]]:
        nonlocal middle
        with gc_pause(), read_directly():
            program = lower(simplify(traced.capture, traced.wanted, choices))
            if not program.cd.c:
                raise ArgumentError(f"{traced.name}: the forward returns what it gets, or views of it, and "
                                    "computes nothing, so there is nothing to plan")
            middle = time.perf_counter()
            parts = partition(program, cut)
            stages = cut_children(parts.program, traced.children)
            parts = reordered(parts, () if stages is None else stages.blocks)
            return parts, block_texts(parts)

    parts, texts = once_of(traced.capture, (traced.wanted, choices, cut, traced.children), make)
    classes, cd = classes_of(texts), parts.program.cd
    nodes = {"captured": parts.program.joint.nodes_before, "computations": len(cd.c), "forward": cd.loss,
             "storages": len(cd.d), "blocks": len(parts.blocks), "unique": len(set(classes)),
             "separators": parts.separators}
    wishes = wishes_of(parts, traced.capture, traced.settings.pins, traced.prefix)
    return Blocked(traced, variant, parts, texts, classes, _fingerprint(parts, texts, wishes), nodes,
                   {"capture": traced.seconds + middle - start, "cut": time.perf_counter() - middle}, wishes)


def choices_of(variant: Variant, settings: Settings) -> frozenset[str]:
    """Return the optional rewrites of a graph (`Joint.choices`): the rows of a variant, and those that the
    settings choose for every variant."""
    asked = {"in-place": settings.gradients == "in_place", "compiled": settings.compile is True,
             "deferred-outputs": CHUNKED_LOSS in variant.rows and settings.deferred_outputs != "never"}
    return frozenset((*(row.name for row in variant.rows), *(name for name, on in asked.items() if on)))


@planning_lock
def with_operation_costs(blocked: Blocked, costs: Sequence[Cost] | None = None, *, link: Link | None = None,
                         limit: Callable[[Blocked], int] | None = None) -> Prepared:
    """Measure each operation, or count; and the way to where data may be sent. `costs`, `link`: of a saved
    plan, instead. `limit`: the bytes that measuring may take."""
    traced, parts = blocked.traced, blocked.partition
    start = time.perf_counter()
    if costs is not None:
        known: Costs = dict(enumerate(costs))
    elif traced.settings.costs == "analytic":
        known = analytic_costs(parts)
        if devices.of(traced.device).elsewhere is None:
            compile_all(parts.program.operation, traced.progress)
        with capture_lock:                  # groups run once, and what the process allocates is read
            known = with_memory_of_groups(parts.program.operation, known)
    else:
        own = functools.partial(measured_costs, blocked, cost_memory(), traced.settings.measure, limit)
        known = own() if traced.measured_by is None else traced.measured_by(blocked, own)
    cd = parts.program.cd
    if costs is None and link is None:
        settings = traced.settings
        link = link_of(settings.offload, devices.of(traced.device), settings.costs, settings.calls)
    reserve = reserve_for_loss(cd) if traced.settings.loss_bytes is None else traced.settings.loss_bytes
    held = (*parts.program.pinned, *(j for j in cd.output_grads if cd.d[j].size <= 16))
    plain = replace(cd.with_costs(known[i] for i in range(len(cd.c))), link=link, held=held,
                    reserve_at_loss=reserve)
    wishes = blocked.wishes
    graph = replace(plain, once=wishes.once, forgotten=wishes.forgotten) if wishes else plain
    whole = choose_kernels(plain, save_all(plain))
    return Prepared(
        blocked, known, graph, whole, simulate(graph, whole), block_infos(parts, blocked.classes),
        {**blocked.stage_seconds, "measure": time.perf_counter() - start})


def on_estimates(traced: Traced, error: MeterError) -> Traced:
    """Return a captured model whose costs are estimated, as somebody measures or profiles now; a warning says
    so."""
    warn(f"{traced.name} cannot be measured now, and its plan counts on estimates: {error}. The temporary "
         "memory of some operations comes on top of the budget: make the plan before (call the module once, "
         "with arguments of these sizes; twice if it is planned by parts)")
    return replace(traced, settings=replace(traced.settings, costs="analytic"))


def estimated(blocked: Blocked) -> Prepared:
    """Return a graph with costs that are estimated, whatever the settings say: nothing is measured."""
    costs = analytic_costs(blocked.partition)
    return with_operation_costs(blocked, [costs[i] for i in range(len(costs))])


@planning_lock
def measured_costs(blocked: Blocked, memory: CostMemory, settings: MeasureSettings,
                   limit: Callable[[Blocked], int] | None) -> Costs:
    """Compile what is to be compiled, and measure each operation that `memory` does not know. `limit`: the
    bytes that measuring may take."""
    traced, parts = blocked.traced, blocked.partition
    compile_all(parts.program.operation, traced.progress)
    with traced.progress.stage("measuring", len(parts.blocks), then="searching") as tick, capture_lock:
        try:
            return measured_within(
                lambda room: measure(
                    parts, blocked.texts, traced.tensors, memory, settings,
                    on_progress=lambda done, total: tick(done * len(blocked.texts) // total), limit=room,
                    step_bytes=touched_bytes(traced.capture.graph)),
                None if limit is None else functools.partial(limit, blocked), traced.device, traced.name)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, RkmateError):
                raise
            raise CaptureError(f"{traced.name} does not run on the sample inputs: {error}. Correct the "
                               "inputs, or the dtypes and devices of the model") from error


def prepare(traced: Traced, variant: Variant | None = None, *, blocked: Blocked | None = None,
            limit: Callable[[Blocked], int] | None = None) -> Prepared:
    """Cut a variant of a captured model into blocks, and find its costs. `blocked`: the blocks, if they are
    known already; `limit`: bytes that measuring may take."""
    return with_operation_costs(blocked or block(traced, variant), limit=limit)


def reserve_for_loss(graph: CDGraph) -> int:
    """Return the bytes to reserve for a loss outside of the model: three times the outputs (log-softmax, the
    gradient that enters it and the gradient that leaves it), and some more for the scalars of any loss."""
    return 512 + 3 * sum(graph.d[j].size for j in graph.output_grads if graph.d[j].size > 64)


def _children(model: nn.Module) -> frozenset[str]:
    """Return names of what an `nn.Sequential` calls one after the other."""
    plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return frozenset(submodules_of(model)) if plain else frozenset()


def cut_children(program: Program, children: frozenset[str]) -> Stages | None:
    """Return the program cut between its children; None where the model has no such."""
    if not children:
        return None
    names = [module_of(node).split(".")[0] for node in program.operation]
    return cut_stages(program, [n if n in children else None for n in names])


def check_model(model: Any, *, compiled: bool = False) -> None:
    """Raise `ArgumentError` for what cannot be a model to train. `compiled`: whether it may be what
    torch.compile has returned."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {type(model).__name__}; it should be a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError("model is a TorchScript module, which cannot be captured; wrap the "
                            "original module")
    if not compiled and original_of(model) is not None:
        raise ArgumentError("model was compiled (torch.compile): plan the module itself. compile=True "
                            "compiles groups of operations inside of a plan")


def held_tensors(captured: Capture, model: nn.Module,
                 tensors: Sequence[torch.Tensor]) -> dict[Source, torch.Tensor]:
    """Return the tensors that the caller holds, by source. `tensors`: the inputs (`Capture.given`)."""
    params, buffers = dict(parameters_by_path(model)), dict(buffers_by_path(model))
    result: dict[Source, torch.Tensor] = {}
    for source in captured.sources.values():
        if source.kind == "param":
            result[source] = tensor_called(params, str(source.key)).detach()
        elif source.kind == "buffer":
            result[source] = buffer_called(model, buffers, str(source.key)).detach()
        elif source.kind == "constant":
            result[source] = captured.constants[str(source.key)]
        elif source.kind == "input":
            result[source] = tensors[int(source.key)].detach()
    return result


def buffer_called(model: nn.Module, buffers: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The buffer of a name, or the attribute that is one in a plan, as a forward reads and assigns it."""
    if owner_name(name) in buffers:
        return tensor_called(buffers, name)
    path, _, leaf = name.rpartition(".")
    found: torch.Tensor = model.get_submodule(path).__dict__[leaf]
    return found


@functools.lru_cache(maxsize=4)
def _memory_of(folder: Path) -> CostMemory:
    return CostMemory(folder)


def cost_memory() -> CostMemory:
    """Return the known costs: in memory, and in the cache folder."""
    return _memory_of(cache_folder())


def _fingerprint(parts: Partition, texts: Sequence[str], wishes: Wishes) -> str:
    digest, cd = hashlib.sha256("".join(texts).encode()), parts.program.cd
    digest.update(repr([(c.inputs, c.outputs) for c in cd.c]).encode())
    digest.update(repr((parts.block_of, parts.segments, sorted(cd.releases.items()))).encode())
    if wishes:
        digest.update(repr((sorted(wishes.once), sorted(wishes.forgotten))).encode())
    return digest.hexdigest()


# -- Groups to compile -----------------------------------------------------------------------------
#
# Groups of operations that are compiled: whether they can be, and what a plan tells about them.


def with_compiler(settings: Settings, device: torch.device) -> Settings:
    """Return the settings with a decision whether to compile, for "auto" by compiling something. If groups
    are compiled, images get the faster layout, unless the settings say otherwise. Raises `CompilerError` if
    compiling is requested, and there is no compiler for the device."""
    if settings.compile is False:
        return settings
    try:
        (try_compiler if settings.compile == "auto" else check_compiler)(device)
    except CompilerError as error:
        if settings.compile is True:
            raise
        warn(f'compile is "auto", and nothing is compiled: {error}')
        return replace(settings, compile=False)
    return replace(settings, compile=True,
                   layouts="auto" if settings.layouts == "with_compile" else settings.layouts)


def clusters_of(operations: Iterable[fx.Node]) -> list[Cluster]:
    """Return the groups among some operations, in their order; equal ones are one."""
    return list(dict.fromkeys(n.target for n in operations if isinstance(n.target, Cluster)))


def compile_all(operations: Iterable[fx.Node], progress: Progress) -> None:
    """Compile the groups among some operations. Raises `CompilerError`."""
    found = clusters_of(operations)
    if found:
        with progress.stage("compiling", len(found)) as tick:
            for k, cluster in enumerate(found):
                tick(k)
                cluster.compile()


def compiled_by(settings: Settings) -> str:
    """Return the name of the compiler that a plan's kernels come from; empty if nothing is compiled."""
    return compiler_version() if settings.compile else ""
