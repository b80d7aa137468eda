"""The order of the stages: capture, simplify, cut, measure, options, chain, schedule.

Only this file knows it. Each stage takes what the stage above returns.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rkmate.errors import ArgumentError, CaptureError, RkmateError
from rkmate.graph.blocks.identity import block_text, classes_of
from rkmate.graph.blocks.infos import block_infos, module_of
from rkmate.graph.blocks.lower import Program, lower
from rkmate.graph.blocks.order import reordered
from rkmate.graph.blocks.partition import Partition, Stages, cut_stages, partition
from rkmate.graph.capture.capture import Capture, Source, capture
from rkmate.graph.capture.structure import take_apart
from rkmate.graph.passes.simplify import simplify
from rkmate.ilp import OptionSet, cache_folder, solve_options
from rkmate.ilp.evaluate_option import judge
from rkmate.ilp.partial_saves import levels
from rkmate.ir.cd import HOISTED, CDGraph, Cost
from rkmate.ir.chain import Block as ChainBlock
from rkmate.ir.chain import Chain
from rkmate.ir.plan import BlockInfo
from rkmate.ir.schedule import Schedule, from_order
from rkmate.ir.simulate import Simulation, simulate
from rkmate.measure.analytic import analytic_costs
from rkmate.measure.costs import Costs, measure, with_costs
from rkmate.measure.remembered import CostMemory
from rkmate.pipeline.settings import Settings
from rkmate.support.gc_pause import gc_pause
from rkmate.support.planning_lock import planning_lock
from rkmate.support.progress import Progress

KEEPING_BLOCKS = 40
"""Up to how many blocks the chain's program lets forwards keep something for one another. Its time
grows with that, and on the deeper models tried (transformers, all) nothing was gained."""
KEEPING_LEVELS = 6
"""At how many levels at most; fewer for longer chains, as many as `KEEPING_TIMES` over the blocks."""
KEEPING_TIMES = 120


@dataclass
class Prepared:
    """A model's graph with costs: what all budgets share."""

    capture: Capture
    partition: Partition
    classes: tuple[int, ...]
    costs: Costs
    settings: Settings
    fingerprint: str
    device: torch.device
    infos: tuple[BlockInfo, ...]
    nodes: Mapping[str, int]
    stage_seconds: dict[str, float]
    progress: Progress
    children: frozenset[str] = frozenset()
    """Names of the children, where the model is an `nn.Sequential`."""

    @cached_property
    def graph(self) -> CDGraph:
        """The whole graph with costs."""
        cd = self.partition.program.cd
        return with_costs(cd, range(len(cd.c)), self.costs)

    @property
    def can_split_heads(self) -> bool:
        """Whether a rewriting is left for budgets that nothing meets (`Settings.split_head`)."""
        return self.settings.split_head == "auto" and bool(self.partition.program.joint.heads)

    @property
    def pinned(self) -> tuple[int, ...]:
        """D nodes that are never forgotten: the user holds the outputs, and autograd the gradient
        of a scalar that a backward starts from."""
        scalars = (j for j in self.partition.program.cd.output_grads
                   if self.partition.program.cd.d[j].size <= 16)
        return (*self.partition.program.pinned, *scalars)

    @cached_property
    def reserve_at_loss(self) -> int:
        """Bytes left for a loss that the caller computes from large outputs.

        Log-softmax, the gradient that enters it and the one that leaves it: three times the outputs;
        and some for the scalars that a loss of any kind holds.
        """
        return 512 + 3 * sum(self.graph.d[j].size for j in self.graph.output_grads
                       if self.graph.d[j].size > 64)

    @cached_property
    def block_graphs(self) -> tuple[CDGraph, ...]:
        """Each block's own graph, with costs."""
        return tuple(with_costs(b.graph, b.c, self.costs) for b in self.partition.blocks)

    @cached_property
    def option_sets(self) -> tuple[OptionSet, ...]:
        """Per class, the options of its blocks."""
        first = {k: b for b, k in reversed(list(enumerate(self.classes)))}
        graphs = [self.block_graphs[first[k]] for k in range(len(first))]
        with self.timed("options"), self.progress.stage("solving blocks", len(graphs)) as tick:
            sets = solve_options(graphs, self.settings.options,
                                 on_progress=lambda done, total: tick(done))
        return tuple(sets)

    def simulate(self, schedule: Schedule) -> Simulation:
        """The simulator's verdict on a schedule of this model."""
        return simulate(self.graph, schedule, pinned=self.pinned, reserve_at_loss=self.reserve_at_loss)

    @cached_property
    def chain(self) -> Chain:
        """The chain of blocks for the dynamic program."""
        p = self.partition
        plain = {k: _plain_forward(self.block_graphs[b]) for k, b in
                 reversed([(k, b) for b, k in enumerate(self.classes)])}
        blocks = tuple(ChainBlock(*plain[k], self.option_sets[k].options) for k in self.classes)
        return self._chained(blocks, p.cuts, p.grads)

    @cached_property
    def keeping_chain(self) -> Chain:
        """The chain whose blocks may keep something for forwards that run again."""
        chain = self.chain
        if len(chain) > KEEPING_BLOCKS:
            return chain
        first = {k: b for b, k in reversed(list(enumerate(self.classes)))}
        with self.timed("chain"):
            kept = levels([self.block_graphs[first[k]] for k in range(len(first))],
                          [s.options for s in self.option_sets],
                          min(KEEPING_LEVELS, KEEPING_TIMES // len(chain)))
        return replace(chain, blocks=tuple(replace(b, kept=kept[k]) for b, k in
                                           zip(chain.blocks, self.classes, strict=True))).verify()

    def _chained(self, blocks: tuple[ChainBlock, ...], cuts: tuple[frozenset[int], ...],
                 grads: Sequence[frozenset[int]]) -> Chain:
        cd = self.graph
        ours = set(cd.outputs)
        sizes = {j: 0 if j in ours else cd.d[j].size for cut in cuts for j in cut}
        return Chain(blocks, cuts, sizes,
                     tuple(sum(cd.d[j].size for j in g) for g in grads)).verify()

    @cached_property
    def stages(self) -> tuple[Chain, tuple[tuple[int, ...], ...]] | None:
        """The children of an `nn.Sequential` as a chain, each with the one option that keeps all, and
        the C nodes of each; None for other models."""
        if not self.children:
            return None
        found = _stages(self.partition.program, self.children)
        graphs = [with_costs(b.graph, b.c, self.costs) for b in found.blocks]
        blocks = tuple(ChainBlock(*_plain_forward(g), (judge(g, g.backward),)) for g in graphs)
        return self._chained(blocks, found.cuts, found.grads), tuple(b.c for b in found.blocks)

    @cached_property
    def constant_bytes(self) -> int:
        """What stands beside the chain: the prelude's values, and what the user holds."""
        p, cd = self.partition, self.graph
        prelude = {j for i in cd.forward if p.block_of[i] == HOISTED for j in cd.c[i].outputs
                   if any(p.block_of[r] != HOISTED for r in cd.readers[j])}
        return sum(cd.d[j].size for j in prelude | set(cd.outputs))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record how long a stage takes."""
        start = time.perf_counter()
        yield
        self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + time.perf_counter() - start


@planning_lock
def prepare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings,
            progress: Progress, wanted: tuple[bool, ...] | None = None,
            costs: Sequence[Cost] | None = None,
            captured: Capture | None = None,
            tensors: Mapping[Source, torch.Tensor] | None = None) -> Prepared:
    """Capture, simplify, cut and measure; one thread at a time.

    `costs`: of a saved plan, instead of measuring. `captured`, `tensors`: what an earlier call
    captured, and the tensors that the caller holds, instead of the model and its arguments.
    """
    check_model(model)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    with gc_pause():
        if captured is None:
            with progress.stage("capturing", None):
                captured = capture(model, args, kwargs)
        if not any(captured.differentiable):
            raise ArgumentError(f"{type(model).__name__}: no output depends on a parameter or input that "
                                "requires a gradient, so there is nothing to train")
        joint = simplify(captured, wanted or wanted_outputs(captured),
                         heads=settings.split_head == "always")
        program = lower(joint)
        seconds["capture"] = time.perf_counter() - start
        start = time.perf_counter()
        parts = partition(program, settings.cut)
        children = _children(model)
        parts = reordered(parts, _stages(parts.program, children).blocks if children else ())
        texts = [block_text(parts.program, b) for b in parts.blocks]
        classes = classes_of(texts)
        seconds["cut"] = time.perf_counter() - start
    arguments, _ = take_apart((args, kwargs), result=False)
    device = _device(model, arguments if tensors is None else list(tensors.values()))
    start = time.perf_counter()
    if costs is not None:
        known = dict(enumerate(costs))
    elif settings.costs == "analytic":
        known = analytic_costs(parts)
    else:
        sources = held_tensors(captured, model, arguments) if tensors is None else tensors
        with progress.stage("measuring", len(parts.blocks)) as tick:
            try:
                known = measure(parts, texts, sources, _cost_memory(), settings.measure,
                                on_progress=lambda done, total: tick(done * len(texts) // total))
            except (IndexError, RuntimeError) as error:
                if isinstance(error, (RkmateError, torch.OutOfMemoryError)):
                    raise
                raise CaptureError(f"{type(model).__name__} does not run on the sample inputs: "
                                   f"{error}") from error
    seconds["measure"] = time.perf_counter() - start
    cd = parts.program.cd
    nodes = {"captured": joint.nodes_before, "computations": len(cd.c), "forward": cd.loss,
             "storages": len(cd.d), "blocks": len(parts.blocks), "unique": len(set(classes)),
             "separators": parts.separators}
    return Prepared(captured, parts, classes, known, settings, _fingerprint(parts, texts), device,
                    block_infos(parts, classes), nodes, seconds, progress, children)


def _children(model: nn.Module) -> frozenset[str]:
    """Names of what an `nn.Sequential` calls one after the other."""
    plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return frozenset(model._modules) if plain else frozenset()


def _stages(program: Program, children: frozenset[str]) -> Stages:
    """The program cut between its children."""
    names = [module_of(node).split(".")[0] for node in program.operation]
    return cut_stages(program, [n if n in children else None for n in names])


def check_model(model: Any) -> None:
    """Raise `ArgumentError` for what cannot be a model to train."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {type(model).__name__}; it should be a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError("model is a TorchScript module, which cannot be captured; wrap the "
                            "original module")


def wanted_outputs(captured: Capture) -> tuple[bool, ...]:
    """Which outputs the loss will use: the one named ``loss``, else scalars, else all but by-products.

    A model that returns its loss beside other tensors (logits, a cache) is trained by the loss. Where
    this guess is wrong, the first backward says so, and the plan follows.
    """
    meta: list[Any] = [n.meta["val"] if n is not None else None for n in captured.outputs]
    able = captured.differentiable
    named = captured.result.index_of("loss")
    if named is not None and able[named] and meta[named].dim() == 0:
        return tuple(i == named for i in range(len(able)))
    scalars = [ok and m is not None and m.dim() == 0 for ok, m in zip(able, meta, strict=True)]
    if any(scalars):
        return tuple(scalars)
    aside = captured.result.under(_BY_PRODUCTS)
    main = tuple(ok and i not in aside for i, ok in enumerate(able))
    return main if any(main) else able


_BY_PRODUCTS = ("past_key_values", "hidden_states", "attentions", "cross_attentions", "mems",
                "encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions",
                "decoder_hidden_states", "decoder_attentions", "cache_params", "router_logits")
"""Fields of Hugging Face outputs that stand beside what the model is trained by."""


def held_tensors(captured: Capture, model: nn.Module,
                 tensors: Sequence[torch.Tensor]) -> dict[Source, torch.Tensor]:
    """The tensors that the caller holds, by source."""
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    result: dict[Source, torch.Tensor] = {}
    for source in captured.sources.values():
        if source.kind == "param":
            result[source] = params[str(source.key)].detach()
        elif source.kind == "buffer":
            result[source] = buffers[str(source.key)].detach()
        elif source.kind == "constant":
            result[source] = captured.constants[str(source.key)]
        elif source.kind == "input":
            result[source] = tensors[int(source.key)].detach()
    return result


def _device(model: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = {t.device for t in (*model.parameters(), *tensors)}
    accelerators = {d for d in devices if d.type != "cpu"}
    if len(accelerators) > 1:
        raise ArgumentError(f"the model and its inputs stand on several devices: "
                            f"{', '.join(map(str, sorted(devices, key=str)))}; a plan is for one")
    if any(d.type == "meta" for d in devices):
        raise ArgumentError("the model has parameters on the meta device: give it memory first "
                            "(model.to_empty)")
    return next(iter(accelerators or devices))


def _plain_forward(graph: CDGraph) -> tuple[float, int]:
    """Time and peak of a forward that keeps nothing but its outputs."""
    n = graph.loss
    forward = CDGraph(graph.d, graph.c[:n], n, (*graph.inputs, *graph.output_grads), graph.outputs)
    result = simulate(forward, from_order(forward, range(n), n))
    return result.seconds, result.peak


@functools.lru_cache(maxsize=4)
def _memory_of(folder: Path) -> CostMemory:
    return CostMemory(folder)


def _cost_memory() -> CostMemory:
    return _memory_of(cache_folder())


def _fingerprint(parts: Partition, texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    cd = parts.program.cd
    digest.update(repr([(c.inputs, c.outputs) for c in cd.c]).encode())
    digest.update(repr((parts.block_of, parts.segments, sorted(cd.releases.items()))).encode())
    return digest.hexdigest()


def with_option_counts(prepared: Prepared) -> tuple[BlockInfo, ...]:
    """The blocks' descriptions, once their options are known."""
    return tuple(replace(info, options=len(prepared.option_sets[k].options))
                 for info, k in zip(prepared.infos, prepared.classes, strict=True))

