"""The joint graph of forward and backward: what passes rewrite, and what is planned when they are done."""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.captured import Capture, Source
from rkmate.graph.ops.properties import is_view
from rkmate.torch_seam.nodes import (
    VALUE,
    carry_wish,
    copied,
    is_backward,
    phase_tag,
    tensors_of,
    wish_of,
    without_descriptor,
)


@dataclass(eq=False)
class Deferred:
    """The recipe of an output that is computed when it is read, as a graph of its own: the operations between
    what is kept and its values."""

    output: int
    """Number of the output."""
    graph: fx.Graph
    sources: dict[fx.Node, Source]
    """The caller's tensor behind each placeholder of the graph; the kind ``kept`` is a value that the forward
    leaves for it."""
    kept: dict[fx.Node, fx.Node]
    """The value of the joint graph for each placeholder of the kind ``kept``."""
    result: fx.Node
    """The output in the graph."""
    origin: dict[fx.Node, fx.Node]
    """The node of the joint graph that each node is a copy of; it may be gone from there."""


@dataclass(eq=False)
class Joint:
    """The simplified joint graph, in one order: forward nodes, then backward nodes.

    Passes assign to its fields and change `graph`; what comes after them does not.
    """

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    """The caller's tensor behind each placeholder."""
    outputs: tuple[fx.Node | None, ...]
    """None stands for an output that is no tensor of the graph, or is deferred."""
    mutations: tuple[tuple[Source, fx.Node], ...] = ()
    """Tensors that the forward overwrites, with the new values."""
    grads: tuple[tuple[Source, fx.Node], ...] = ()
    """Gradients, in the order in which they are handed on."""
    wanted: tuple[bool, ...] = ()
    """Per output, whether the backward takes its gradient."""
    choices: frozenset[str] = frozenset()
    """Names of what passes do to this graph and need not: rows of the table of variants, and what settings
    want (`rkmate.pipeline.prepare`). Each trades something for memory or time."""
    nodes_before: int = 0
    """Operations captured, views and aliases included."""
    constant: frozenset[fx.Node] = frozenset()
    """Nodes that depend on no trained value."""
    decisions: frozenset[fx.Node] = frozenset()
    """Operations of the forward whose outcome must stand: they run once."""
    deferred: tuple[Deferred, ...] = ()
    """Outputs that are computed when they are read."""
    counters: tuple[tuple[Source, int], ...] = ()
    """Integers that the forward also overwrites, each with the number that is added to it."""
    concerned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Per choice that a pass knows, the names of the weights that it concerns, chosen or not."""

    def copy(self) -> Joint:
        """Return a copy, to be rewritten apart."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op != "output":
                new[node] = copied(graph, node, new)
        return dataclasses.replace(
            self, graph=graph, sources={new[n]: s for n, s in self.sources.items()},
            outputs=tuple(None if n is None else new[n] for n in self.outputs),
            mutations=tuple((s, new[n]) for s, n in self.mutations),
            grads=tuple((s, new[n]) for s, n in self.grads),
            constant=frozenset(new[n] for n in self.constant),
            decisions=frozenset(new[n] for n in self.decisions),
            deferred=tuple(dataclasses.replace(
                d, kept={mine: new[n] for mine, n in d.kept.items()},
                origin={mine: new.get(n, n) for mine, n in d.origin.items()}) for d in self.deferred),
            concerned=dict(self.concerned))

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let everything read `new` instead of `node`."""
        wish = wish_of(node)
        if wish is not None and wish_of(new) is None and not is_backward(node):
            carry_wish(new, wish)
        node.replace_all_uses_with(new)
        self.outputs = tuple(new if n is node else n for n in self.outputs)
        self.mutations = tuple((s, new if n is node else n) for s, n in self.mutations)
        self.grads = tuple((s, new if n is node else n) for s, n in self.grads)
        for deferred in self.deferred:
            deferred.kept.update({mine: new for mine, n in deferred.kept.items() if n is node})

    def name(self, node: fx.Node) -> str:
        """Return the caller's name of a value, if it has one."""
        return str(self.sources[node].key) if node in self.sources else node.name

    @property
    def kept(self) -> tuple[fx.Node, ...]:
        """Values that deferred outputs are computed from: the forward leaves them."""
        return tuple(dict.fromkeys(n for d in self.deferred for n in d.kept.values()))

    def handed(self) -> set[fx.Node]:
        """Return the nodes whose value the caller receives."""
        return {n for n in self.outputs if n is not None} | {n for _, n in self.mutations} \
            | {n for _, n in self.grads} | set(self.kept)

    def results(self) -> set[fx.Node]:
        """Return the nodes whose value leaves the graph: the caller receives it, or it is added to a tensor
        of the caller."""
        return self.handed() | self.additions()

    def additions(self) -> set[fx.Node]:
        """Return the operations that add to a tensor of the caller: their result is there."""
        return {n for n in self.graph.nodes if adds(n)}

    def written(self) -> set[Source]:
        """Return the sources that the forward writes to."""
        return {s for s, _ in self.mutations} | {s for s, _ in self.counters}

    def overwritten(self) -> set[fx.Node]:
        """Return the placeholders of buffers and inputs that the forward writes to, without counters."""
        targets = {s for s, _ in self.mutations}
        return {n for n, s in self.sources.items() if s in targets}

    def leaves(self, node: fx.Node) -> bool:
        """Return whether the caller gets the node's value, or a view of it."""
        todo = [node]
        while todo:
            n = todo.pop()
            if n in self.outputs:
                return True
            todo += [u for u in n.users if is_view(u)]
        return False


def joint_of(capture: Capture, wanted: tuple[bool, ...], choices: frozenset[str] = frozenset()) -> Joint:
    """Return a copy of a captured graph, for rewriting."""
    return Joint(capture.graph, capture.sources, capture.outputs, capture.mutations, capture.grads, wanted,
                 choices, sum(n.op == "call_function" for n in capture.graph.nodes)).copy()


def adds(node: fx.Node) -> bool:
    """Return whether the operation has a side effect: it adds to a gradient of the caller."""
    return bool(node.meta.get("adds"))


def owner_of(node: fx.Node) -> fx.Node:
    """Return the value whose storage a view looks at."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def readers_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return everything that depends on some values, without these."""
    return _reached(nodes, lambda n: n.users)


def makers_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return everything that some values depend on, without these."""
    return _reached(nodes, lambda n: n.all_input_nodes)


def _reached(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [m for n in nodes for m in step(n)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += step(node)
    return found


# -- Arguments and values --------------------------------------------------------------------------


def arguments(node: fx.Node, defaults: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Return the positional arguments of a node; `defaults` give those that it leaves out at the end."""
    args: tuple[Any, ...] = tuple(node.args)
    return *args, *defaults[len(args):]


def value_of(node: fx.Node) -> Any:
    """Return a node's value, or the first one of several."""
    value = node.meta.get(VALUE)
    return value[0] if isinstance(value, (tuple, list)) and value else value


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value, or of the first of several; empty if it is not a tensor."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of the elements of a node's value, or of the first of several; 0 if it is not a
    tensor."""
    value = value_of(node)
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


# -- Operations that passes add --------------------------------------------------------------------


def inserted(graph: fx.Graph, before: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...], *,
             meta: Mapping[str, Any] | None = None, name: str | None = None, **kwargs: Any) -> fx.Node:
    """Insert an operation with its value before a node, in the module and the phase of `like`, and return it.
    `meta`: what is noted of it instead of what is noted of `like`."""
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, kwargs, name)
    node.meta = without_descriptor(like.meta if meta is None else meta)
    node.meta[VALUE] = result_of(node, like)
    return node


def result_of(node: fx.Node, like: fx.Node | None = None,
              instead: Mapping[fx.Node, Any] | None = None) -> Any:
    """Return the result of an operation for the values of its inputs. `like`: a node with a value, for an
    operation without inputs; `instead`: other values of some inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs),
                                   lambda n: (instead or {}).get(n, n.meta[VALUE]))
    nodes = [*node.all_input_nodes, *([] if like is None else [like])]
    mode: Any = next(v.fake_mode for n in nodes for v in tensors_of(n.meta[VALUE]))  # type: ignore[attr-defined]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def call_meta(results: Sequence[fx.Node], *, backward: bool) -> dict[str, Any]:
    """Return what is noted of a call that makes some values."""
    return {k: v for k, v in results[0].meta.items() if k != VALUE} | phase_tag(backward=backward)


def item_of(joint: Joint, call: fx.Node, k: int) -> fx.Node:
    """Return one of the results of a call."""
    with joint.graph.inserting_after(call):
        item = joint.graph.call_function(operator.getitem, (call, k))
    item.meta = call.meta | {VALUE: call.meta[VALUE][k]}
    return item


def put_in_order(graph: fx.Graph) -> None:
    """Move what reads a value that stands after it, as little as can be. What is moved keeps its order, so
    that equal layers stay equal."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    placed: set[fx.Node] = set()
    for node in place:
        needed, todo = {node}, [node]
        while todo:
            missing = {n for n in todo.pop().all_input_nodes if n not in placed} - needed
            needed |= missing
            todo += missing
        waits = {n: sum(m in needed for m in n.all_input_nodes) for n in needed - placed}
        ready = [(place[n], n) for n, count in waits.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, first = heapq.heappop(ready)
            if first is not node:
                node.prepend(first)
            placed.add(first)
            for user in first.users:
                if user in waits:
                    waits[user] -= 1
                    if not waits[user]:
                        heapq.heappush(ready, (place[user], user))
