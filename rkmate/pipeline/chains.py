"""From a graph in blocks to a planner's problem: the options of each block, and the chain of blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rkmate.ilp import OptionSet, solve_options
from rkmate.ilp.evaluate_option import evaluate_option
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Block, Chain
from rkmate.ir.chain import Option as BlockOption
from rkmate.ir.plan import BlockInfo
from rkmate.ir.schedule import from_order
from rkmate.ir.simulate import simulate
from rkmate.ir.summary import GraphSummary
from rkmate.pipeline.prepare import Prepared, cut_children
from rkmate.pipeline.summarise import summarise
from rkmate.planners.protocol import Problem
from rkmate.planners.protocol import Stages as StageChain


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
    def options(self) -> list[Sequence[BlockOption]]:
        """Of each block."""
        return [block.options for block in self.problem.chain.blocks]


def solve(prepared: Prepared) -> Solved:
    """The options of every class of blocks, by integer programs, and the chain of blocks."""
    start = time.perf_counter()
    sets = options_of(prepared)
    middle = time.perf_counter()
    problem = solve_with(prepared, sets)
    return Solved(prepared, problem, summarise(prepared), {
        **prepared.stage_seconds, "options": middle - start, "chain": time.perf_counter() - middle})


def solve_with(prepared: Prepared, sets: Sequence[OptionSet]) -> Problem:
    """A planner's problem, of known options."""
    return Problem(
        prepared.graph, chain_of(prepared, sets), tuple(b.c for b in prepared.partition.blocks),
        prepared.pinned, prepared.reserve_at_loss, stages_of(prepared), prepared.blocked.classes,
        prepared.class_graphs)


def options_of(prepared: Prepared) -> tuple[OptionSet, ...]:
    """Per class, the options of its blocks."""
    graphs = prepared.class_graphs
    with prepared.blocked.traced.progress.stage("solving blocks", len(graphs)) as tick:
        return tuple(solve_options(graphs, prepared.settings.options,
                                   on_progress=lambda done, total: tick(done)))


def chain_of(prepared: Prepared, sets: Sequence[OptionSet]) -> Chain:
    """The chain of blocks for the dynamic program."""
    parts = prepared.partition
    plain = [_plain_forward(graph) for graph in prepared.class_graphs]
    blocks = tuple(Block(*plain[k], sets[k].options) for k in prepared.blocked.classes)
    return _chained(prepared.graph, blocks, parts.cuts, parts.grads)


def stages_of(prepared: Prepared) -> StageChain | None:
    """The children of an `nn.Sequential` as a chain, each with the one option that keeps all, and the C
    nodes of each; None for other models."""
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
