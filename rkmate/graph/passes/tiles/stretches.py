"""The rewrite that lets stretches of operations run in tiles: images of a batch, bands of an image, blocks of
a sequence, columns of weights. Where one layer sets the smallest budget, no order of operations needs less;
tiles do.

Norms that mix elements (a batch norm that is trained) end a stretch, or have their statistics computed
before, in a pass over tiles that computes the stretch up to the norm once more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes.joint import (
    Joint,
    bytes_of,
    call_meta,
    item_of,
    put_in_order,
    readers_of,
    shape_of,
    value_of,
)
from rkmate.graph.passes.tiles.choosing import HEAVY, Labels, Plan, chosen, looked_at
from rkmate.graph.passes.tiles.matching import Matcher
from rkmate.graph.passes.tiles.norms import moved_on, norm_of
from rkmate.graph.passes.tiles.stretch import (
    STATISTICS,
    Key,
    Port,
    Stretch,
    backward_of,
    derivative,
    forward_of,
    statistics_of,
)
from rkmate.torch_seam.nodes import VALUE, is_backward
from rkmate.torch_seam.trace import operations_of

aten = torch.ops.aten

_FILLED = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
           aten.new_ones.default, aten.new_full.default}
"""Operators whose result has its operand's form alone, and no gradient."""


def tile_stretches(joint: Joint) -> None:
    """Note the weights of what could run in tiles; let stretches run so where that is asked for."""
    names: list[str] = []
    norms: list[str] = []
    if "tiles" not in joint.choices:
        forward = [n for n in joint.graph.nodes if not is_backward(n)]
        names = [n.name for n in forward if n.target in HEAVY]
        norms = names if any(norm_of(n) is not None for n in forward) else []
    else:
        for plan in chosen(joint):
            found = _rewrite(joint, plan) or []
            names += found
            norms += found if plan.labels.mixing.intersection(plan.nodes) else []
    joint.concerned["tiles"] = tuple(dict.fromkeys(names))
    joint.concerned["tiled-norms"] = tuple(dict.fromkeys(norms))


# -- A stretch of the joint graph ------------------------------------------------------------------


def extracted(labels: Labels, nodes: Sequence[fx.Node], trained: Collection[fx.Node]) -> Stretch:
    """Return operations as a graph of their own. `trained`: values that have a gradient."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    stretch = Stretch(labels.axis.name, graph, {}, {}, {})
    nodes = [*_views_of_wholes(labels, nodes), *nodes]
    inside = set(nodes)
    inner = [n for n in labels.inner if n.args[0] in inside and n.args[0] not in labels.mixing]
    items: list[tuple[Any, fx.Node]] = [(n.args[1], n) for n in labels.inner]
    stretch.statistics_of = {norm: {k: n for k, n in items if n.args[0] is norm}
                             for norm in nodes if norm in labels.mixing}
    for node in [*nodes, *inner]:
        mine = {}
        for operand in node.all_input_nodes:
            if operand in inside:
                mine[operand] = copies[operand]
            else:
                mine[operand] = graph.placeholder("port")
                mine[operand].meta[VALUE] = operand.meta[VALUE]
                stretch.ports[mine[operand]] = Port(mine[operand], operand, operand in trained)
        copies[node] = graph.node_copy(node, mine.__getitem__)
        copies[node].meta = {VALUE: node.meta[VALUE]}
        stretch.origin[copies[node]] = node
        if node in labels.dims:
            stretch.dims[copies[node]] = labels.dims[node]
        elif node in labels.sums:
            stretch.sums[copies[node]] = labels.sums[node]
    return stretch


def _views_of_wholes(labels: Labels, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the views of other values that a stretch alone reads, and reads whole: with them, gradients of
    the values themselves are added up."""
    found: list[fx.Node] = []
    needs = [need for node in nodes for need in labels.needs.get(node, ())]
    cut = {n for n, band in needs if band is not None}
    for view in (n for n, _ in needs if n not in cut):
        chain: list[fx.Node] = []
        while view not in nodes and is_view(view) and view.target is not operator.getitem and all(
                is_backward(u) or u in chain or u in nodes for u in view.users):
            chain.append(view)
            view = view.args[0]                                             # type: ignore[assignment]
        found += [n for n in reversed(chain) if n not in found]
    return found


def _trained(joint: Joint) -> set[fx.Node]:
    sources = {s for s, _ in joint.grads}
    found = {n for n, s in joint.sources.items() if s in sources}
    for node in joint.graph.nodes:
        if node.target not in _FILLED and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {n for n in found if not is_backward(n) and isinstance(n.meta.get(VALUE), torch.Tensor)
            and n.meta[VALUE].is_floating_point()}


def _rewrite(joint: Joint, plan: Plan) -> list[str] | None:
    """Let a stretch run in tiles. Returns the names of its weights; None, and nothing is changed, where it
    cannot run so."""
    stretch = extracted(plan.labels, plan.nodes, _trained(joint))
    _find_results(joint, stretch)
    if not stretch.results:
        return None
    matched = _match(joint, stretch)
    if matched is None:
        return None
    entering, groups = matched
    # The first gradient may take the memory of one that enters.
    like = {(shape_of(r), value_of(r).dtype) for r, _ in entering}
    groups.sort(key=lambda g: -bytes_of(g[1]) if (shape_of(g[1]), value_of(g[1]).dtype) in like else 0)
    forward = backward = counted = None
    norms = stretch.norms(stretch.results)
    for parts in range(min(plan.parts, stretch.most_parts()), 1, -1):
        forward = forward_of(stretch, stretch.results, "stretch_forward", parts)
        counted = statistics_of(stretch, norms, "stretch_statistics", parts) if norms else None
        if forward is not None and groups:
            backward = backward_of(stretch, dict(entering), groups, "stretch_backward", parts)
        if forward is not None and (backward is not None or not groups) \
                and (counted is not None or not norms):
            break
    else:
        return None
    assert forward is not None
    results = [stretch.origin[r] for r in stretch.results]
    known: dict[fx.Node, fx.Node] = {}
    if counted is not None:
        known = _count(joint, stretch, list(norms), counted)
    _call(joint, *_with(forward, known), (), results, backward=False)
    if backward is not None:
        _call(joint, *_with(backward, known), [g for _, g in entering], [c for _, c in groups],
              backward=True)
    put_in_order(joint.graph)
    of = [looked_at(p.of) for p in stretch.ports.values()]
    return [joint.name(n) for n in of if n in joint.sources and joint.sources[n].kind == "param"]


def _are_cut(stretch: Stretch) -> bool:
    """Return whether tiles make all results, each of them one tensor, of what is one tensor each."""
    return all((r in stretch.dims or r in stretch.sums) and isinstance(r.meta[VALUE], torch.Tensor)
               for r in stretch.results) and all(
        isinstance(p.of.meta[VALUE], torch.Tensor) for p in stretch.ports.values())


def _find_results(joint: Joint, stretch: Stretch) -> None:
    """Note the operations whose results are read outside; for a view, what it looks at."""
    inside = set(stretch.origin.values())
    handed = joint.handed()
    statistics = {u for items in stretch.statistics_of.values() for u in items.values()}
    outside = [n for n in inside if n in handed or any(
        u not in inside and u not in statistics and not is_backward(u) for u in n.users)]
    _add_results(stretch, outside)


def _add_results(stretch: Stretch, nodes: Iterable[fx.Node]) -> None:
    inside = set(stretch.origin.values())
    found = {stretch.origin[r] for r in stretch.results}
    for node in nodes:
        while is_view(node) and node in inside:
            node = node.args[0]                                             # type: ignore[assignment]
        found |= {node} & inside
    stretch.results = [n for n in stretch.operations if stretch.origin[n] in found]


_Entering = list[tuple[fx.Node, fx.Node]]
_Groups = list[tuple[list[Port], fx.Node]]


def _match(joint: Joint, stretch: Stretch) -> tuple[_Entering, _Groups] | None:
    """Return the stretch's results with the gradients that enter by them, and groups of its ports with the
    gradients that leave; None if they are not found, or if something else reads what is computed between.
    Results that only the backward of others reads are added to the stretch's."""
    if not _are_cut(stretch):
        return None
    trained = _trained(joint)
    ports = [p for p in stretch.ports.values() if p.trained]
    entering = [r for r in stretch.results if stretch.origin[r] in trained]
    between: set[fx.Node] = set()
    of_results: _Entering = []
    groups: _Groups = []
    if ports and entering:
        derived, gradients = derivative(stretch, entering, ports)
        matcher = Matcher(joint.graph.nodes)
        inputs = [n for n in derived.nodes if n.op == "placeholder"]
        known = dict(zip(inputs, (p.of for p in stretch.ports.values()), strict=False))
        found = matcher.match(derived, known, [g for g in gradients if g is not None])
        if found is None:
            return None
        tangents = inputs[len(known):]
        of_results = [(r, found[t]) for r, t in zip(entering, tangents, strict=True) if t in found]
        from_tangents = readers_of(tangents)
        between = {found[n] for n in found if n in from_tangents}
        leaving = [([p], found[g]) for p, g in zip(ports, gradients, strict=True) if g is not None]
        groups, sums = _together(matcher, leaving, between)
        between |= sums
        between = {n for n in joint.graph.nodes if matcher.same(n) in between}
        replaced = {n for n in between if any(matcher.same(n) is c for _, c in groups)}
        handed = joint.handed()
        if any(n not in replaced and (n in handed or any(u not in between for u in n.users))
               for n in between):
            return None
        for _, gradient in groups:
            for node in replaced:
                if node is not gradient and matcher.same(node) is gradient:
                    joint.replace(node, gradient)
    if any(k < 3 and (n in joint.handed() or not between.issuperset(n.users))
           for items in stretch.statistics_of.values() for k, n in items.items()):
        return None
    more = [n for n in stretch.origin.values()
            if any(is_backward(u) and u not in between for u in n.users)]
    _add_results(stretch, more)
    return (of_results, groups) if _are_cut(stretch) else None


def _together(matcher: Matcher, leaving: _Groups, between: set[fx.Node]) -> tuple[_Groups, set[fx.Node]]:
    """Return gradients of one value as one where the joint graph adds them up and reads nothing else of them,
    and these sums. What passes a stretch as it is does not leave it."""
    sums: set[fx.Node] = set()
    by_value: dict[fx.Node, _Groups] = {}
    for ports, gradient in leaving:
        by_value.setdefault(ports[0].of, []).append((ports, gradient))
    found: _Groups = []
    taken: set[fx.Node] = set()
    for entries in by_value.values():
        merged = True
        while merged and len(entries) > 1:
            merged = False
            for a in entries:
                for user in a[1].users:
                    b = next((e for e in entries if e is not a and user.target is aten.add.Tensor
                              and not user.kwargs and set(map(matcher.same, user.all_input_nodes)) == {
                                  a[1], e[1]}), None)
                    if b is not None and all(len(e[1].users) == 1 or e[1] not in between | sums
                                             for e in (a, b)):
                        entries = [e for e in entries if e is not a and e is not b]
                        entries.append(([*a[0], *b[0]], matcher.same(user)))
                        sums.add(matcher.same(user))
                        merged = True
                        break
                if merged:
                    break
        for ports, gradient in entries:
            if gradient in between | sums and gradient not in taken:
                taken.add(gradient)
                found.append((ports, gradient))
    return found, sums


def _with(made: tuple[Any, list[Key]], known: Mapping[fx.Node, fx.Node]) -> tuple[Any, list[fx.Node]]:
    """Return a computation in tiles and its arguments. `known`: statistics of norms in the joint graph."""
    return made[0], [known.get(of, of) for of, _ in made[1]]


def _count(joint: Joint, stretch: Stretch, norms: Sequence[fx.Node], made: tuple[Any, list[Key]],
           ) -> dict[fx.Node, fx.Node]:
    """Let tiles compute the statistics of norms, and the running ones be made of these. Returns the values of
    the joint graph that stand for the stretch's statistics."""
    whole = [stretch.origin[n] for n in norms]
    items = _called(joint, *_with(made, {}), whole, backward=False)
    known = {port.of: items[STATISTICS * k + 2 + i]
             for k, n in enumerate(norms) for i, port in enumerate(stretch.statistics(n))}
    for node in norms:
        norm = norm_of(stretch.origin[node])
        assert norm is not None
        if norm.running is None:
            continue
        given = [*norm.running, *(known[p.of] for p in stretch.statistics(node))]
        replaced = stretch.statistics_of[stretch.origin[node]]
        for k, n in zip((3, 4), _written_out(joint, moved_on(norm), given, call_meta(whole, backward=False)),
                        strict=True):
            if k in replaced:
                joint.replace(replaced[k], n)
    return known


def _written_out(joint: Joint, function: Callable[..., Any], given: Sequence[fx.Node], meta: dict[str, Any],
                 ) -> list[fx.Node]:
    """Return a function's results, written as operations of the joint graph. `given`: its operands, of which
    the last one is there last."""
    written = operations_of(function, [n.meta[VALUE] for n in given])
    copies = dict(zip([n for n in written.nodes if n.op == "placeholder"], given, strict=True))
    with joint.graph.inserting_after(given[-1]):
        for n in [n for n in written.nodes if n.op == "call_function"]:
            copies[n] = joint.graph.node_copy(n, copies.__getitem__)
            copies[n].meta = meta | {VALUE: n.meta[VALUE]}
    output: Any = written.output_node().args[0]
    return [copies[n] for n in (output if isinstance(output, (tuple, list)) else [output])]


def _call(joint: Joint, banded: Any, args: Sequence[fx.Node], more: Sequence[fx.Node],
          results: Sequence[fx.Node], *, backward: bool) -> None:
    """Let a computation in tiles replace the operations that make some values."""
    items = _called(joint, banded, [*args, *more], results, backward=backward)
    for k, result in enumerate(results):
        joint.replace(result, items[k])
    put_in_order(joint.graph)


def _called(joint: Joint, banded: Any, args: Sequence[fx.Node], results: Sequence[fx.Node], *,
            backward: bool) -> list[fx.Node]:
    """Return the results of a call that replaces the operations that make some values."""
    after = readers_of(results)
    anchor = next((n for n in joint.graph.nodes if n in after), results[-1])
    with joint.graph.inserting_before(anchor):
        call = joint.graph.create_node("call_function", banded, tuple(args), {}, banded.name)
    with args[0].meta[VALUE].fake_mode:
        call.meta = call_meta(results, backward=backward) | {VALUE: banded.values()}
    return [item_of(joint, call, k) for k in range(len(banded.gives))]
