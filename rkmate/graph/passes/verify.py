"""Check the invariants of the joint graph between two passes. Used in tests."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.errors import GraphError
from rkmate.graph.capture.captured import Source
from rkmate.graph.ops.properties import is_random, is_view
from rkmate.graph.passes.joint import Joint, adds
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import VALUE, is_backward

Form = tuple[torch.Size, torch.dtype] | None
"""The properties of a value that no rewrite may change; None if it is not a tensor."""


def verify(joint: Joint) -> Joint:
    """Check the graph, and return it. Raises `GraphError`, which names the node.

    Every input of a node stands before it. The forward reads nothing of the backward. Each placeholder has
    a source, and what leaves the graph (outputs, new values of what is overwritten, gradients) is a node
    of it, in the form of what it belongs to. Nothing is there that nobody reads. What adds to a gradient of
    the caller's is of the backward; nothing else reads that gradient, and nobody its sum.
    """
    results = joint.results()
    before: set[fx.Node] = set()
    late = {n for n, s in joint.sources.items() if s.kind == "tangent"}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            _verify_call(node, before, late, results)
        elif node not in joint.sources:
            raise GraphError(f"{node.name} ({node.op}) has no source")
        before.add(node)
    for what, nodes in (("a source", joint.sources), ("a constant", joint.constant),
                        ("a decision", joint.decisions), ("a result", results)):
        for node in nodes:
            if node not in before:
                raise GraphError(f"{what}, {node.name}, is no node of the graph")
    for node in joint.constant:
        if node in late or is_random(node):
            raise GraphError(f"{node.name} is no constant")
    _verify_additions(joint)
    place = {source: node for node, source in joint.sources.items()}
    for what, pairs in (("new value", joint.mutations), ("gradient", joint.grads)):
        for source, node in pairs:
            if source.repeats is not None:
                source = Source("input", source.repeats)
            if source not in place:
                raise GraphError(f"{node.name} is the {what} of {source.key}, which the graph does not have")
            if form_of(node) != form_of(place[source]):
                raise GraphError(f"{node.name} is the {what} of {source.key} and has another form: "
                                 f"{form_of(node)}, not {form_of(place[source])}")
    return joint


def _verify_additions(joint: Joint) -> None:
    places = {n for n, s in joint.sources.items() if s.kind == "grad"}
    for node in joint.graph.nodes:
        read = places.intersection(node.all_input_nodes)
        if not adds(node):
            if read and not is_view(node):
                raise GraphError(f"{node.name} reads the gradient {min(n.name for n in read)}, which is "
                                 "there to be added to")
            places.update([node] if read else [])
        elif not is_backward(node) or not read or not read.issuperset(_added_to(node)) \
                or any(u.target is not operator.getitem for u in node.users):
            raise GraphError(f"{node.name} adds to a gradient, and should do so in the backward, to "
                             "places for gradients, and for nobody to read")


def _added_to(node: fx.Node) -> set[Any]:
    """Return the arguments that an operation adds to: the first one, or those that a tiled operation sums
    into."""
    if isinstance(node.target, Tiled):
        return set(node.args[len(node.args) - len(node.target.into):])
    return {node.args[0]}


def _verify_call(node: fx.Node, before: set[fx.Node], late: set[fx.Node], results: set[fx.Node]) -> None:
    """Check an operation that comes after the nodes in `before`. `late`: the nodes of the backward so far."""
    if is_backward(node):
        late.add(node)
    for n in node.all_input_nodes:
        if n not in before:
            raise GraphError(f"{node.name} reads {n.name}, which does not stand before it")
        if n in late and node not in late:
            raise GraphError(f"{node.name} of the forward reads {n.name} of the backward")
    if VALUE not in node.meta:
        raise GraphError(f"{node.name} has no value to tell its form by")
    if not node.users and node not in results and (is_backward(node) or not is_random(node)):
        raise GraphError(f"nobody reads {node.name}")


def form_of(node: fx.Node) -> Form:
    """Return shape and dtype of a node's value."""
    return _form(node.meta.get(VALUE))


def _output_forms(joint: Joint) -> list[Form]:
    """Return the forms of the outputs, including those that are computed later."""
    later = {d.output: d.result for d in joint.deferred}
    return [None if node is None else form_of(node)
            for node in (later.get(i, n) for i, n in enumerate(joint.outputs))]


def _form(value: Any) -> Form:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True)
class _Call:
    """A node at one moment. Nothing in it is changed in place, so that the same objects are the same."""

    target: Any
    args: Any
    kwargs: Any
    value: Any

    @staticmethod
    def of(node: fx.Node) -> _Call:
        return _Call(node.target, node.args, node.kwargs, node.meta.get(VALUE))

    def inputs(self) -> list[Any]:
        """Return the arguments, in order, without their containers."""
        found: list[Any] = []
        fx.node.map_aggregate((self.args, self.kwargs), found.append)
        return found


class Verifier:
    """Verifies a graph after each pass, also against what it was before: no pass changes the form of an
    output, of a value, or of what an operation reads."""

    def __init__(self, joint: Joint) -> None:
        self._note(joint)

    def _note(self, joint: Joint) -> None:
        self._outputs = _output_forms(joint)
        self._calls = {n: _Call.of(n) for n in joint.graph.nodes}

    def check(self, joint: Joint, name: str) -> None:
        """Verify the graph that a pass has left. Raises `GraphError`, which names the pass."""
        try:
            verify(joint)
            if _output_forms(joint) != self._outputs:
                raise GraphError("an output has another form")
            for node in joint.graph.nodes:
                if node in self._calls:
                    self._verify_unchanged(node, self._calls[node])
        except GraphError as error:
            raise GraphError(f"after the pass {name!r}: {error}") from None
        self._note(joint)

    def _verify_unchanged(self, node: fx.Node, before: _Call) -> None:
        value = node.meta.get(VALUE)
        if value is not before.value and _form(value) != _form(before.value):
            raise GraphError(f"{node.name} has another form: {_form(value)}, not {_form(before.value)}")
        if (node.args is before.args and node.kwargs is before.kwargs) or node.target != before.target \
                or is_view(node):                       # a view may look at its base's base
            return
        for was, now in zip(before.inputs(), _Call.of(node).inputs(), strict=False):
            if was is not now and isinstance(was, fx.Node) and isinstance(now, fx.Node):
                form = _form(self._calls[was].value)
                if form_of(now) != form:
                    raise GraphError(f"{node.name} reads {now} of the form {form_of(now)} instead of {was} "
                                     f"of the form {form}")
