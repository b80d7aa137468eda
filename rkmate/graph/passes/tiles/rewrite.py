"""A region of the joint graph becomes one call, with its gradients in the forward, or two.

A backward is linear in the gradients that come in. Where a region's depends on one number alone, the
gradient of a loss, it can run in the forward for a gradient of one, on the same tile: the backward then only
multiplies. Else the region's backward computes its forward again, tile by tile.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.graph.ops.losses import SCALE
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.graph.passes.tiles.build import build, called
from rkmate.graph.passes.tiles.linear import is_linear
from rkmate.graph.passes.tiles.region import Region, close, makers_of, needed, readers_of
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import VALUE, phase_tag

aten = torch.ops.aten


def late_nodes(work: Joint) -> set[fx.Node]:
    """What depends on an incoming gradient, these included."""
    tangents = [n for n, s in work.sources.items() if s.kind == "tangent"]
    return {*tangents, *readers_of(tangents)}


def tile(work: Joint, region: Region, name: str, parts: int, *, apart: Collection[fx.Node] = (),
         in_forward: bool = True) -> bool:
    """Let a region run in tiles. False, and nothing is changed, where it cannot.

    `apart`: values of it that its other readers get as before, computed once more. `in_forward`: whether its
    gradients may be computed with its forward, where they can.
    """
    late = late_nodes(work)
    if not (in_forward and _in_one_call(work, region, late, apart, name, parts)) \
            and not _in_two_calls(work, region, late, apart, name, parts):
        return False
    put_in_order(work.graph)
    return True


def results_of(work: Joint, region: Region, apart: Collection[fx.Node]) -> list[fx.Node]:
    """The values of a region that others read; of a view, what it looks at."""
    found: dict[fx.Node, None] = {}
    for node in region.results(work.results()):
        while is_view(node) and node.args[0] in region.forms:
            node = node.args[0]  # type: ignore[assignment]
        if node not in apart:
            found[node] = None
    order = {n: k for k, n in enumerate(work.graph.nodes)}
    return sorted(found, key=order.__getitem__)


# -- gradients in the forward -----------------------------------------------------------


def _in_one_call(work: Joint, region: Region, late: set[fx.Node], apart: Collection[fx.Node], name: str,
                 parts: int) -> bool:
    region = copy.copy(region)
    region.forms, region.sums = dict(region.forms), set(region.sums)
    if not close(region):
        return False
    results = results_of(work, region, apart)
    nodes = needed(region, results)
    makers = makers_of(nodes)
    before = [n for n in work.graph.nodes if n in makers and n not in nodes and (n in late or is_backward(n))]
    tangents = [n for n in before if n.op != "call_function"]
    if len(tangents) != 1 or tangents[0].meta[VALUE].dim() or any(
            not is_linear(n, late) or n.meta[VALUE].dtype == torch.float16      # small gradients vanish
            for n in (*before, *nodes) if n in late and n is not tangents[0]):
        return False
    built = build(region, nodes, results, name, parts)
    if built is None:
        return False
    tiled, arguments = built
    after = readers_of(nodes)
    anchor = next(n for n in work.graph.nodes if is_backward(n) or (n in after and n not in nodes))
    with work.graph.inserting_before(anchor):
        copies = {tangents[0]: _one(work, tangents[0])}
        for node in before:
            if node.op == "call_function":
                copies[node] = work.graph.node_copy(node, lambda n: copies.get(n, n))
                copies[node].meta = node.meta | phase_tag(backward=False)
        call = called(work.graph, tiled, [copies.get(a, a) for a in arguments],
                      _meta(results, backward=False))
    for k, result in enumerate(results):
        item = _item(work, call, k)
        if result in late:
            with work.graph.inserting_before(result):
                scaled = work.graph.call_function(SCALE, (item, tangents[0]))
            scaled.meta = dict(result.meta)
            work.replace(result, scaled)
        else:
            work.replace(result, item)
    return True


def _one(work: Joint, tangent: fx.Node) -> fx.Node:
    """A gradient of one."""
    value = tangent.meta[VALUE]
    node = work.graph.call_function(aten.full.default, ([], 1.0),
                                    {"dtype": value.dtype, "device": value.device})
    with value.fake_mode:
        node.meta = {VALUE: torch.empty_like(value), **phase_tag(backward=False)}
    return node


# -- forward and backward apart ---------------------------------------------------------


def _in_two_calls(work: Joint, region: Region, late: set[fx.Node], apart: Collection[fx.Node], name: str,
                  parts: int) -> bool:
    results = results_of(work, region, apart)
    of_backward = [n for n in results if n in late]
    # What is narrow, or summed up over all rows, is handed on; what is wide is computed again.
    handed = {n for n in region.forms if n not in late and not is_view(n) and (
        n in region.sums or (not region.wide(n) and isinstance(n.meta[VALUE], torch.Tensor)))}
    again = needed(region, of_backward, handed) if of_backward else set()
    wanted = [n for n in work.graph.nodes if n in region.forms and n not in late and (
        n in results or (n in handed and any(u in again for u in n.users)))]
    again -= {n for n in again if n in handed and n not in late}
    made: list[tuple[tuple[Tiled, list[fx.Node]], Sequence[fx.Node], bool]] = []
    some: Sequence[fx.Node]
    for some, nodes, backward in ((wanted, needed(region, wanted), False), (of_backward, again, True)):
        if some:
            built = build(region, nodes, some, f"{name}_{'backward' if backward else 'forward'}", parts)
            if built is None:
                return False
            made.append((built, some, backward))
    for (tiled, arguments), some, backward in made:
        after = readers_of(some)
        anchor = next((n for n in work.graph.nodes if n in after), some[-1])
        with work.graph.inserting_before(anchor):
            call = called(work.graph, tiled, arguments, _meta(some, backward=backward))
        for k, result in enumerate(some):
            work.replace(result, _item(work, call, k))
    return bool(made)


# -- nodes ------------------------------------------------------------------------------


def _meta(results: Sequence[fx.Node], *, backward: bool) -> dict[str, Any]:
    return {k: v for k, v in results[0].meta.items() if k != VALUE} | phase_tag(backward=backward)


def _item(work: Joint, call: fx.Node, k: int) -> fx.Node:
    with work.graph.inserting_after(call):
        item = work.graph.call_function(operator.getitem, (call, k))
    item.meta = call.meta | {VALUE: call.meta[VALUE][k]}
    return item


def put_in_order(graph: fx.Graph) -> None:
    """Move what reads a value that stands after it, as little as can be."""
    placed: set[fx.Node] = set()
    for node in list(graph.nodes):
        todo = [node]
        while todo:
            top = todo[-1]
            missing = [n for n in top.all_input_nodes if n not in placed]
            if top in placed or not missing:
                todo.pop()
                if top not in placed and top is not node:
                    node.prepend(top)
                placed.add(top)
            else:
                todo += missing

