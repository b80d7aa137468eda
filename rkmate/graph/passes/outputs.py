"""Rewrites of wide outputs that no loss is computed from: they are left out of the step.

A language model returns logits next to its loss, and the caller holds them. If the loss takes its logits a
few rows at a time, the returned logits are the only tensor of their size. The tensors that they are computed
from are small: these are kept, and the logits are computed when somebody reads them.

One pass removes such outputs before losses are rewritten, so that the rewrites of losses see no other reader
of the logits. A second pass puts back the outputs that the step computes anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.captured import Source
from rkmate.graph.ops.properties import BATCHED_PRODUCTS, PRODUCTS, is_pointwise, is_random, is_view
from rkmate.graph.passes.joint import Deferred, Joint, bytes_of, owner_of
from rkmate.graph.passes.lean import is_wide
from rkmate.torch_seam.nodes import VALUE, copied, is_backward

aten = torch.ops.aten
_CASTS = {aten._to_copy.default, aten.clone.default}
SMALLER = 2
"""The kept values are smaller than the output by at least this factor."""


def take_outputs_off(joint: Joint) -> None:
    """Take wide outputs without a gradient off, where they come from a product of small values through
    views and operations element by element."""
    for number, node in enumerate(joint.outputs):
        if node is None or joint.wanted[number] or not _is_wide(node.meta.get(VALUE)):
            continue
        recipe = _Recipe(joint, node)
        if recipe.found:
            joint.deferred += (recipe.written(number),)
            joint.outputs = tuple(None if k == number else n for k, n in enumerate(joint.outputs))


def put_outputs_back(joint: Joint) -> None:
    """Put the outputs back whose wide values are still computed in the step."""
    there = set(joint.graph.nodes)
    computed = [d for d in joint.deferred if any(
        old in there and _computes(old) and bytes_of(old) * SMALLER > bytes_of(d.result)
        for old in d.origin.values())]
    back = {d.output: _copied_back(joint, d, there) for d in computed}
    joint.deferred = tuple(d for d in joint.deferred if d not in computed)
    joint.outputs = tuple(back.get(k, n) for k, n in enumerate(joint.outputs))


def _copied_back(joint: Joint, deferred: Deferred, there: set[fx.Node]) -> fx.Node:
    """Return the output in the joint graph; values that are gone from there are made again at the end of the
    forward."""
    first = next(n for n in joint.graph.nodes if n.op == "call_function" and is_backward(n))
    values = dict(deferred.kept)
    with joint.graph.inserting_before(first):
        for node in deferred.graph.nodes:
            if node in values:
                continue
            old = deferred.origin[node]
            values[node] = old if old in there else copied(joint.graph, node, values)
    return values[deferred.result]


class _Recipe:
    """The operations that compute an output when it is read."""

    def __init__(self, joint: Joint, output: fx.Node) -> None:
        self._overwritten = joint.overwritten()
        self._sources = joint.sources
        self._output = output
        self._nodes: dict[fx.Node, None] = {}
        """Nodes of the recipe, each after its inputs."""
        self._kept: dict[fx.Node, None] = {}
        self._products = 0
        self.found = output.op == "call_function" and self._grow(output) and self._products > 0 \
            and sum(bytes_of(owner_of(n)) for n in self._kept) * SMALLER <= bytes_of(output)

    def _grow(self, node: fx.Node) -> bool:
        """Take a wide value in, with what it is computed from."""
        if node in self._nodes:
            return True
        if node.op != "call_function" or is_random(node):
            return False
        product = node.target in (*PRODUCTS, *BATCHED_PRODUCTS)
        if not (product or is_view(node) or _is_by_elements(node)):
            return False
        self._products += product
        for n in node.all_input_nodes:
            if not (self._from_sources(n) or self._keep(n) or (not product and self._grow(n))):
                return False
        self._nodes[node] = None
        return True

    def _keep(self, node: fx.Node) -> bool:
        """Keep a small value of the forward, with the storage that it stands in."""
        owner = owner_of(node)
        if not isinstance(node.meta.get(VALUE), torch.Tensor) or owner.op != "call_function" \
                or bytes_of(owner) * SMALLER > bytes_of(self._output):
            return False
        self._kept[node] = None
        return True

    def _from_sources(self, node: fx.Node) -> bool:
        """Take in what is a view or a cast of what the caller holds."""
        chain: list[fx.Node] = []
        while node not in self._sources:
            if node.op != "call_function" or len(node.all_input_nodes) != 1 \
                    or not (is_view(node) or node.target in _CASTS):
                return False
            chain.append(node)
            node = node.all_input_nodes[0]
        if node in self._overwritten or self._sources[node].kind == "tangent":
            return False
        self._nodes.update(dict.fromkeys([node, *reversed(chain)]))
        return True

    def written(self, number: int) -> Deferred:
        """Return the recipe as a separate graph."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        sources: dict[fx.Node, Source] = {}
        kept: dict[fx.Node, fx.Node] = {}
        for node in self._kept:
            made = copies[node] = graph.placeholder(node.name)
            made.meta[VALUE] = node.meta[VALUE]
            sources[made], kept[made] = Source("kept", made.name), node
        for node in sorted(self._nodes, key=lambda n: n not in self._sources):
            copies[node] = copied(graph, node, copies)
            if node in self._sources:
                sources[copies[node]] = self._sources[node]
        return Deferred(number, graph, sources, kept, copies[self._output],
                        {copies[n]: n for n in self._nodes})


def _is_wide(value: Any) -> bool:
    """Return whether a value has several wide rows: a batch may have only one sequence."""
    return isinstance(value, torch.Tensor) and any(is_wide(value, dim) for dim in range(value.dim()))


def _is_by_elements(node: fx.Node) -> bool:
    return node.target in _CASTS or is_pointwise(node.target)


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_view(node)
