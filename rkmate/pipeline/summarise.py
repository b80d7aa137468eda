"""From a prepared model to the summary of its graph that a plan carries."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.blocks.infos import Modules
from rkmate.graph.passes.simplify import is_backward
from rkmate.ir.cd import HOISTED
from rkmate.ir.summary import Captured, CapturedKind, Computation, GraphSummary, Storage
from rkmate.pipeline.origin import shape_of
from rkmate.pipeline.prepare import Prepared
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import operator_name
from rkmate.torch_seam.tensors import read_directly


@read_directly()
def summarise(prepared: Prepared) -> GraphSummary:
    """Names, operations, module paths, sizes and times of a model's graph."""
    parts, module_of = prepared.partition, Modules()
    program, graph = parts.program, prepared.graph
    computations = tuple(
        Computation(c.name, _operation(node), module_of(node), c.phase, parts.block_of[i], c.inputs,
                    c.outputs, c.time, c.overhead, c.random, i in program.constant,
                    c.donors, c.alternatives, c.decides, c.adds)
        for i, (c, node) in enumerate(zip(graph.c, program.operation, strict=True)))
    storages = tuple(Storage(d.name, d.size, d.kind, _shape(owner.meta.get(VALUE)))
                     for d, owner in zip(graph.d, program.owner, strict=True))
    made = GraphSummary(
        computations, storages, graph.loss, graph.outputs, graph.output_grads, graph.input_grads,
        dict(graph.releases), prepared.pinned, prepared.reserve_at_loss,
        tuple(tuple(sorted(c)) for c in parts.cuts), _captured(prepared, module_of), graph.link)
    made.__dict__["cd"] = graph         # which is what it would make again
    return made


def _captured(prepared: Prepared, module_of: Modules) -> tuple[Captured, ...]:
    """The forward before simplification. Each view and dropped node stands in the block of what it
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
