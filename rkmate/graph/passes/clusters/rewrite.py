"""A rewriting pass: groups of operations between the heavy ones become one computation each.

Inductor compiles each into as few loops as it can: what is made in between never exists as a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from rkmate.graph.passes.clusters.cluster import Cluster
from rkmate.graph.passes.clusters.fusable import fusable
from rkmate.graph.passes.clusters.grow import groups, outside_readers
from rkmate.graph.passes.clusters.reads import Reads
from rkmate.graph.passes.clusters.repeat import computed_again
from rkmate.graph.passes.dead_code import drop_dead
from rkmate.graph.passes.joint import Joint, is_backward, is_view, owner_of
from rkmate.graph.passes.tiles.rewrite import put_in_order
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import OpOverload, operator_name


@dataclass(frozen=True)
class _Made:
    cluster: Cluster
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    last: fx.Node
    """The operation whose place it takes."""


def fuse(work: Joint) -> None:
    """Let groups of operations be compiled."""
    fused, reads = fusable(work), Reads()
    again = computed_again(work, fused, reads)
    leaving = {owner_of(n) for n in work.results()}
    found = groups(work, fused, again, reads)
    of: dict[int, _Made | None] = {}
    for k, members in sorted(enumerate(found), key=lambda g: not is_backward(g[1][0])):
        each = of[k] = _made(members, fused, again, leaving, reads)
        if each is not None and is_backward(members[0]):
            leaving.update(each.arguments)      # what values are computed again from is a result, too
    made = [each for k in range(len(found)) if (each := of[k]) is not None]
    items: dict[fx.Node, fx.Node] = {}
    for each in made:
        with work.graph.inserting_after(each.last):
            call = work.graph.create_node("call_function", each.cluster, (), {}, f"fused_{each.cluster.name}")
        call.meta = {**each.last.meta, VALUE: tuple(n.meta[VALUE] for n in each.results)}
        place = call
        for k, result in enumerate(each.results):
            with work.graph.inserting_after(place):
                item = place = work.graph.call_function(operator.getitem, (call, k))
            item.meta = dict(result.meta)
            items[result] = item
        call.meta["rkmate_arguments"] = each.arguments
    for each in made:
        for result in each.results:
            work.replace(result, items[result])
    for node in list(work.graph.nodes):
        arguments = node.meta.pop("rkmate_arguments", None)
        if arguments is not None:
            node.args = tuple(items.get(a, a) for a in arguments)
    put_in_order(work.graph)
    drop_dead(work)
    there = set(work.graph.nodes)              # a view of a constant may have no reader any more
    work.constant, work.decisions = work.constant & there, work.decisions & there


def _made(members: Sequence[fx.Node], fused: Collection[fx.Node], again: Collection[fx.Node],
          leaving: Collection[fx.Node], reads: Reads) -> _Made | None:
    """A group as one computation; None where nothing would be won."""
    own = set(members)
    results = tuple(n for n in members if n in leaving or outside_readers(n, own, again, fused, reads))
    builder = _Builder(own, again if is_backward(members[0]) else ())
    for node in results:
        builder.visit(node)
    if not results or sum(n in own or n in builder.repeated for n in builder.order) < 2:
        return None
    graph, arguments = builder.graph(results)
    return _Made(Cluster(graph), arguments, results, max(members, key=_Position(members)))


class _Position:
    """Where nodes stand in their graph."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        wanted = set(nodes)
        self._of = {n: k for k, n in enumerate(nodes[0].graph.nodes) if n in wanted}

    def __call__(self, node: fx.Node) -> int:
        return self._of[node]


class _Builder:
    """A group's graph: its members, what they look at through views, and what is computed again."""

    def __init__(self, members: Collection[fx.Node], again: Collection[fx.Node]) -> None:
        self.members, self.again = members, again
        self.order: dict[fx.Node, None] = {}
        """Operations and views, each after what it reads."""
        self.arguments: dict[fx.Node, None] = {}
        self.repeated: set[fx.Node] = set()

    def visit(self, node: fx.Node) -> None:
        """Note what a value is made of."""
        todo = [node]
        while todo:
            top = todo[-1]
            if top in self.order or top in self.arguments:
                todo.pop()
            elif not self._inside(top):
                self.arguments[top] = None
                todo.pop()
            elif missing := [n for n in top.all_input_nodes if n not in self.order
                             and n not in self.arguments]:
                todo += reversed(missing)
            else:
                self.order[top] = None
                if top in self.again:
                    self.repeated.add(top)
                todo.pop()

    def _inside(self, node: fx.Node) -> bool:
        return is_view(node) or node in self.members or (node in self.again and not is_backward(node))

    def graph(self, results: Sequence[fx.Node]) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.arguments:
            copies[node] = graph.placeholder("x")
            copies[node].meta[VALUE] = node.meta[VALUE]
        for node in self.order:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            name = operator_name(node.target).strip("_") if isinstance(node.target, OpOverload) else "part"
            copies[node] = graph.create_node("call_function", node.target, args, kwargs, name)
            copies[node].meta[VALUE] = node.meta[VALUE]
        graph.output(tuple(copies[r] for r in results))
        return graph, tuple(self.arguments)
