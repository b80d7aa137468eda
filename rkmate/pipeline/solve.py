"""Turn a graph in blocks into a planner's problem: the options of each block, the chain of blocks, and the
summary of the graph that a plan carries."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rkmate.graph.blocks.identity import Modules
from rkmate.ilp.grid import OptionSet, evaluate_option, lean_options
from rkmate.ilp.solve_all import solve_options
from rkmate.ir.cd import HOISTED, CDGraph
from rkmate.ir.chain import Backward, Block, Chain, Forward, Op, Option
from rkmate.ir.plan import BlockInfo, Run
from rkmate.ir.schedule import Compute, CopyIn, Free, Leave, Schedule, Start, from_order
from rkmate.ir.simulate import simulate
from rkmate.ir.summary import Captured, CapturedKind, Computation, GraphSummary
from rkmate.pipeline.model import shape_of
from rkmate.pipeline.prepare import Prepared, cut_children
from rkmate.planners.protocol import Problem
from rkmate.planners.protocol import Stages as StageChain
from rkmate.torch_seam.nodes import VALUE, is_backward
from rkmate.torch_seam.schema import operator_name
from rkmate.torch_seam.tensors import read_directly

# -- Options and chain -----------------------------------------------------------------------------
#
# From a graph in blocks to a planner's problem: the options of each block, and the chain of blocks.


@dataclass(frozen=True, eq=False)
class Solved:
    """A prepared model with the options of its blocks: what planners work on, for any budget."""

    prepared: Prepared
    problem: Problem
    summary: GraphSummary
    """The graph as plans carry it."""
    stage_seconds: Mapping[str, float]

    @property
    def infos(self) -> tuple[BlockInfo, ...]:
        """The blocks' descriptions, now that their options are known."""
        return tuple(replace(info, options=len(block.options)) for info, block in
                     zip(self.prepared.infos, self.problem.chain.blocks, strict=True))

    @property
    def options(self) -> list[Sequence[Option]]:
        """The options of each block."""
        return [block.options for block in self.problem.chain.blocks]


def solve(prepared: Prepared) -> Solved:
    """Return the options of every class of blocks, by integer programs, and the chain of blocks."""
    return solve_more(solve_lean(prepared))


def lean_problem(prepared: Prepared) -> Problem:
    """Return the planner's problem with the options of each block that need no solver."""
    return solve_with(prepared, [lean_options(graph) for graph in prepared.class_graphs])


def solve_lean(prepared: Prepared) -> Solved:
    """Return the few options of every class of blocks that need no solver, and the chain of blocks."""
    start = time.perf_counter()
    problem = lean_problem(prepared)
    return Solved(prepared, problem, summarise(prepared), {
        **prepared.stage_seconds, "chain": time.perf_counter() - start})


def solve_more(lean: Solved) -> Solved:
    """Return what `solve` does. What is known of the graph alone stays known."""
    start = time.perf_counter()
    sets = options_of(lean.prepared)
    middle = time.perf_counter()
    problem = lean.problem.with_chain(chain_of(lean.prepared, sets))
    return replace(lean, problem=problem, stage_seconds={
        **lean.stage_seconds, "options": middle - start,
        "chain": lean.stage_seconds["chain"] + time.perf_counter() - middle})


def solve_with(prepared: Prepared, sets: Sequence[OptionSet]) -> Problem:
    """Return a planner's problem, of known options."""
    return Problem(
        prepared.searched, chain_of(prepared, sets), tuple(b.c for b in prepared.partition.blocks),
        stages_of(prepared), prepared.regions, prepared.of_graph)


def options_of(prepared: Prepared) -> tuple[OptionSet, ...]:
    """Return the options of the blocks of each class. They take at most half of the time that is left."""
    graphs, traced = prepared.class_graphs, prepared.blocked.traced
    seconds = None if math.isinf(traced.until) else max(0.0, traced.until - time.perf_counter()) / 2
    with traced.progress.stage("solving blocks", len(graphs), then="searching") as tick:
        return tuple(solve_options(graphs, prepared.settings.options, seconds=seconds,
                                   on_progress=lambda done, total: tick(done)))


def chain_of(prepared: Prepared, sets: Sequence[OptionSet]) -> Chain:
    """Return the chain of blocks for the dynamic program."""
    parts = prepared.partition
    plain = [_plain_forward(graph) for graph in prepared.class_graphs]
    blocks = tuple(Block(*plain[k], sets[k].options) for k in prepared.blocked.classes)
    return _chained(prepared.graph, blocks, parts.cuts, parts.grads)


def stages_of(prepared: Prepared) -> StageChain | None:
    """Return the children of an `nn.Sequential` as a chain, each with the one option that keeps all, and the
    C nodes of each; None for other models."""
    stages = cut_children(prepared.partition.program, prepared.blocked.traced.children)
    if stages is None:
        return None
    cd = prepared.graph
    graphs = [b.graph.with_costs(prepared.costs[i] for i in b.c) for b in stages.blocks]
    blocks = tuple(Block(*_plain_forward(g), (evaluate_option(g, g.backward),)) for g in graphs)
    return _chained(cd, blocks, stages.cuts, stages.grads), tuple(b.c for b in stages.blocks)


def _chained(cd: CDGraph, blocks: tuple[Block, ...], cuts: tuple[frozenset[int], ...],
             grads: Sequence[frozenset[int]]) -> Chain:
    ours = set(cd.outputs)
    sizes = {j: 0 if j in ours else cd.d[j].size for cut in cuts for j in cut}
    return Chain(blocks, cuts, sizes, tuple(sum(cd.d[j].size for j in g) for g in grads)).verify()


def _plain_forward(graph: CDGraph) -> tuple[float, int]:
    """Time and peak of a forward that keeps nothing but its outputs."""
    n = graph.loss
    forward = CDGraph(graph.d, graph.c[:n], n, (*graph.inputs, *graph.output_grads), graph.outputs)
    result = simulate(forward, from_order(forward, range(n), n))
    return result.seconds, result.peak


# -- The summary of a graph ------------------------------------------------------------------------
#
# From a prepared model to the summary of its graph that a plan carries.


@read_directly()
def summarise(prepared: Prepared) -> GraphSummary:
    """Return names, operations, module paths, sizes and times of a model's graph."""
    parts, module_of = prepared.partition, Modules()
    program = parts.program
    computations = tuple(
        Computation(_operation(node), module_of(node), block, constant=i in program.constant)
        for i, (node, block) in enumerate(zip(program.operation, parts.block_of, strict=True)))
    return GraphSummary(
        prepared.graph, computations, tuple(_shape(owner.meta.get(VALUE)) for owner in program.owner),
        tuple(tuple(sorted(c)) for c in parts.cuts),
        _captured(prepared, module_of))


def _captured(prepared: Prepared, module_of: Modules) -> tuple[Captured, ...]:
    """Return the forward before simplification. Each view and dropped node stands in the block of what it
    reads, or of what reads it."""
    parts = prepared.partition
    block = {c.name: parts.block_of[i] for i, c in enumerate(prepared.graph.c)}
    left = {n.name for n in parts.program.joint.graph.nodes}
    nodes = [n for n in prepared.capture.graph.nodes
             if n.op == "call_function" and not is_backward(n)]
    number = {n: k for k, n in enumerate(nodes)}
    where: dict[fx.Node, int] = {}
    for node in nodes:
        before = [where[n] for n in node.all_input_nodes if n in where]
        where[node] = block.get(node.name, max(before, default=HOISTED))
    for node in reversed(nodes):
        if where[node] == HOISTED and node.name not in block:
            after = [where[n] for n in node.users if n in where]
            where[node] = min(after, default=HOISTED)
    result = []
    for node in nodes:
        kind: CapturedKind = "operation" if node.name in block else \
            "view" if node.name in left else "dropped"
        result.append(Captured(node.name, _operation(node), module_of(node), where[node], kind,
                               tuple(number[n] for n in node.all_input_nodes if n in number)))
    return tuple(result)


def _operation(node: fx.Node) -> str:
    target: Any = node.target
    return operator_name(target, str(getattr(target, "__name__", target))).lstrip("_")


def _shape(value: Any) -> str:
    return shape_of(value) if isinstance(value, torch.Tensor) else ""


# -- Runs of blocks in a schedule ------------------------------------------------------------------
#
# The runs of blocks in a schedule, whether or not it is made of block operations.


def runs_of_operations(ops: Iterable[Op], options: Sequence[Sequence[Option]]) -> Iterator[Run]:
    """Yield one run for each operation. `options`: of each block."""
    for op in ops:
        chosen = op.option if isinstance(op, Forward | Backward) else None
        yield Run(op.block, "backward" if isinstance(op, Backward) else "forward", chosen,
                  None if chosen is None else options[op.block][chosen].saved_bytes)


def runs_of(schedule: Schedule, graph: CDGraph, block_of: Sequence[int]) -> Iterator[Run]:
    """Return stretches of one block's computations, of the forward or of the backward.

    `block_of`: each C node's block. What a forward run keeps is what of its block is in memory when
    the next run begins.
    """
    here: tuple[int, str] | None = None
    there: set[int] = set()
    for step in schedule.steps:
        if isinstance(step, Free | Leave):
            there.discard(step.d)
        elif isinstance(step, CopyIn):
            there.add(step.d)
        elif isinstance(step, Start):
            there.update(graph.c[step.c].outputs)
        elif isinstance(step, Compute) and block_of[step.c] != HOISTED:
            kind = "backward" if step.c >= graph.loss else "forward"
            place = (block_of[step.c], kind)
            if here is not None and place != here:
                yield _run(here, there, graph, block_of)
            here = place
        if isinstance(step, Compute):
            there.update(graph.c[step.c].outputs)
    if here is not None:
        yield _run(here, there, graph, block_of)


def _run(place: tuple[int, str], there: set[int], graph: CDGraph, block_of: Sequence[int]) -> Run:
    block, phase = place
    saved = None
    if phase == "forward":
        saved = graph.bytes(j for j in there if (made := graph.producer[j]) is not None
                            and made < graph.loss and block_of[made] == block)
    return Run(block, phase, None, saved)

