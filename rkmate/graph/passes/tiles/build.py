"""From operations of a region to a tiled computation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.graph.ops.parts import part_bytes
from rkmate.graph.passes.tiles.forms import TURNED, WHOLE, shape_of
from rkmate.graph.passes.tiles.region import Region, readers_of
from rkmate.graph.passes.tiles.rules import Tile, emit
from rkmate.graph.passes.tiles.source import Give
from rkmate.graph.passes.tiles.sums import emit_sum
from rkmate.graph.passes.tiles.tiled import Tiled, propagate
from rkmate.torch_seam.nodes import VALUE

MOST_PARTS = 32
LEAST_ROWS = 32
"""In more parts, or of fewer rows, a region is much slower than the whole: each tile reads and writes the
sums of the weights' gradients. Fewer parts take their place where there is room (`alternatives`)."""


def default_parts(region: Region, like: torch.Tensor) -> int:
    """In how many parts a region runs unless somebody chooses otherwise."""
    total = region.rows * region.width * like.element_size()
    parts = min(MOST_PARTS, region.rows // LEAST_ROWS, -(-total // part_bytes(like, total)))
    return max(1, parts)


def build(region: Region, nodes: Collection[fx.Node], results: Sequence[fx.Node], name: str,
          parts: int) -> tuple[Tiled, list[fx.Node]] | None:
    """Operations of a region as one computation, and its arguments; None where a result of it would be an
    argument, or an argument has no rows to cut.

    `results`: of those operations, the ones whose values are wanted.
    """
    inside = [n for n in results[0].graph.nodes if n in nodes]
    arguments: dict[tuple[fx.Node, int], None] = {}
    for node in inside:
        for operand, form in region.needs(node).items():
            if operand in nodes:
                if operand in region.sums:
                    return None
            elif form == TURNED or not isinstance(operand.meta.get(VALUE), torch.Tensor):
                return None
            else:
                arguments[operand, form] = None
    # What is computed a second time here may lead to an argument; a result may not.
    after = readers_of(results)
    if any(n in after for n, _ in arguments) \
            or any(_form(region, n) == TURNED or is_view(n) for n in results):
        return None
    graph = fx.Graph()
    n = graph.placeholder("n")
    made = {key: graph.placeholder("x" if key[1] else "w") for key in arguments}
    step = -(-region.rows // parts)
    like = inside[0].meta[VALUE]
    with like.fake_mode:
        n.meta[VALUE] = step
        for (operand, form), node in made.items():
            value = operand.meta[VALUE]
            node.meta[VALUE] = value if form == WHOLE else torch.empty(
                (step, *value.shape[form:]), dtype=value.dtype, device=value.device)
    values: dict[fx.Node, fx.Node] = {}
    for node in inside:
        forms = region.needs(node)
        operands: Mapping[fx.Node, fx.Node] = {
            o: values[o] if o in nodes else made[o, form] for o, form in forms.items()}
        tile = Tile(graph, n, operands, forms, region.rows)
        values[node] = emit_sum(node, tile) if node in region.sums else emit(node, region.forms[node], tile)
    graph.output(tuple(values[r] for r in results))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    with like.fake_mode:
        propagate(graph)
    gives = tuple(Give(tuple(v.shape), v.dtype, v.device, _form(region, r))
                  for r in results for v in [r.meta[VALUE]])
    taken = tuple(form for _, form in arguments)
    shapes = tuple(shape_of(a) or () for a, _ in arguments)
    return Tiled(name, graph, region.rows, parts, taken, shapes, gives), [a for a, _ in arguments]


def _form(region: Region, node: fx.Node) -> int:
    return WHOLE if node in region.sums else region.forms[node]


def called(graph: fx.Graph, tiled: Tiled, arguments: Sequence[fx.Node], meta: dict[str, Any]) -> fx.Node:
    """A node that calls a tiled computation."""
    node = graph.create_node("call_function", tiled, tuple(arguments), {}, tiled.name)
    with arguments[0].meta[VALUE].fake_mode:
        node.meta = meta | {VALUE: tiled.values()}
    return node
