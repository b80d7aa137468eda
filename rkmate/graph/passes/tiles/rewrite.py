"""A region of the joint graph becomes one call that computes its gradients in the forward, or two calls, or
ordinary operations on a few groups of rows.

A backward is linear in the incoming gradients. If the backward of a region depends on one number only, the
gradient of a loss, it can run in the forward for a gradient of one, on the same tile: the backward then only
multiplies. Otherwise, the backward of the region computes the forward again, tile by tile.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.losses import SCALE
from rkmate.graph.ops.parts import part_bytes
from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes.joint import (
    Joint,
    call_meta,
    inserted,
    item_of,
    makers_of,
    put_in_order,
    readers_of,
    result_of,
    shape_of,
)
from rkmate.graph.passes.tiles.region import Region, close, is_linear, needed
from rkmate.graph.passes.tiles.rules import TURNED, WHOLE, RowTile, emit, emit_sum
from rkmate.graph.passes.tiles.source import Give
from rkmate.graph.passes.tiles.tiled import Tiled, propagate
from rkmate.torch_seam.nodes import VALUE, is_backward, phase_tag, without_descriptor

aten = torch.ops.aten


# -- From operations to a tiled computation --------------------------------------------------------

MOST_PARTS = 32
LEAST_ROWS = 32
"""In more parts, or of fewer rows, a region is much slower than the whole: each tile reads and writes the
sums of the weights' gradients. Fewer parts replace them where there is room (`alternatives`)."""


def default_parts(region: Region, like: torch.Tensor) -> int:
    """Return the number of parts in which a region runs by default."""
    total = region.rows * region.width * like.element_size()
    parts = min(MOST_PARTS, region.rows // LEAST_ROWS, -(-total // part_bytes(like, total)))
    return max(1, parts)


def build(region: Region, nodes: Collection[fx.Node], results: Sequence[fx.Node], name: str,
          parts: int) -> tuple[Tiled, list[fx.Node]] | None:
    """Return operations of a region as one computation, and its arguments; None if one of its results would
    be an argument, or if an argument has no rows to cut.

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
        tile = RowTile(graph, n, operands, forms)
        values[node] = emit_sum(node, tile, is_part=True) if node in region.sums \
            else emit(node, region.forms[node], tile)
    graph.output(tuple(values[r] for r in results))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    with like.fake_mode:
        propagate(graph)
    gives = tuple(Give(tuple(v.shape), v.dtype, v.device, _form(region, r))
                  for r in results for v in [r.meta[VALUE]])
    taken = tuple(form for _, form in arguments)
    shapes = tuple(shape_of(a) for a, _ in arguments)
    return Tiled(name, graph, region.rows, parts, taken, shapes, gives), [a for a, _ in arguments]


def _form(region: Region, node: fx.Node) -> int:
    return WHOLE if node in region.sums else region.forms[node]


def called(graph: fx.Graph, tiled: Tiled, arguments: Sequence[fx.Node], meta: dict[str, Any]) -> fx.Node:
    """Return a node that calls a tiled computation."""
    node = graph.create_node("call_function", tiled, tuple(arguments), {}, tiled.name)
    with arguments[0].meta[VALUE].fake_mode:
        node.meta = meta | {VALUE: tiled.values()}
    return node


# -- Calls -----------------------------------------------------------------------------------------


def late_nodes(joint: Joint) -> set[fx.Node]:
    """Return everything that depends on an incoming gradient, including these gradients."""
    tangents = [n for n, s in joint.sources.items() if s.kind == "tangent"]
    return {*tangents, *readers_of(tangents)}


def tile(joint: Joint, region: Region, parts: int, *, apart: Collection[fx.Node], in_forward: bool) -> bool:
    """Let a head run in tiles. False, and nothing is changed, where it cannot.

    `apart`: values of it that its other readers get as before, computed once more. `in_forward`: whether its
    gradients may be computed with its forward, where they can.
    """
    late = late_nodes(joint)
    if not (in_forward and _in_one_call(joint, region, late, apart, parts)) \
            and not _in_two_calls(joint, region, late, apart, parts):
        return False
    put_in_order(joint.graph)
    return True


def results_of(joint: Joint, region: Region, apart: Collection[fx.Node]) -> list[fx.Node]:
    """Return the values of a region that others read; for a view, the value that it looks at."""
    found: dict[fx.Node, None] = {}
    for node in region.results(joint.results()):
        while is_view(node) and node.args[0] in region.forms:
            node = node.args[0]  # type: ignore[assignment]
        if node not in apart:
            found[node] = None
    order = {n: k for k, n in enumerate(joint.graph.nodes)}
    return sorted(found, key=order.__getitem__)


# -- Calls: gradients in the forward ---------------------------------------------------------------


def _in_one_call(joint: Joint, region: Region, late: set[fx.Node], apart: Collection[fx.Node],
                 parts: int) -> bool:
    region = copy.copy(region)
    region.forms, region.sums = dict(region.forms), set(region.sums)
    if not close(region):
        return False
    results = results_of(joint, region, apart)
    nodes = needed(region, results)
    makers = makers_of(nodes)
    before = [n for n in joint.graph.nodes
              if n in makers and n not in nodes and (n in late or is_backward(n))]
    tangents = [n for n in before if n.op != "call_function"]
    if len(tangents) != 1 or tangents[0].meta[VALUE].dim() or any(
            not is_linear(n, late) or n.meta[VALUE].dtype == torch.float16      # small gradients vanish
            for n in (*before, *nodes) if n in late and n is not tangents[0]):
        return False
    built = build(region, nodes, results, "head", parts)
    if built is None:
        return False
    tiled, arguments = built
    after = readers_of(nodes)
    anchor = next(n for n in joint.graph.nodes if is_backward(n) or (n in after and n not in nodes))
    with joint.graph.inserting_before(anchor):
        value = tangents[0].meta[VALUE]
        copies = {tangents[0]: inserted(
            joint.graph, anchor, tangents[0], aten.full.default, ([], 1.0), meta=phase_tag(backward=False),
            dtype=value.dtype, device=value.device)}
        for node in before:
            if node.op == "call_function":
                copies[node] = joint.graph.node_copy(node, lambda n: copies.get(n, n))
                copies[node].meta = node.meta | phase_tag(backward=False)
        call = called(joint.graph, tiled, [copies.get(a, a) for a in arguments],
                      call_meta(results, backward=False))
    for k, result in enumerate(results):
        item = item_of(joint, call, k)
        if result in late:
            with joint.graph.inserting_before(result):
                scaled = joint.graph.call_function(SCALE, (item, tangents[0]))
            scaled.meta = dict(result.meta)
            joint.replace(result, scaled)
        else:
            joint.replace(result, item)
    return True


# -- Calls: forward and backward apart -------------------------------------------------------------


def _in_two_calls(joint: Joint, region: Region, late: set[fx.Node], apart: Collection[fx.Node],
                  parts: int) -> bool:
    results = results_of(joint, region, apart)
    of_backward = [n for n in results if n in late]
    # What is narrow, or summed up over all rows, is handed on; what is wide is computed again.
    handed = {n for n in region.forms if n not in late and not is_view(n) and (
        n in region.sums or (not region.wide(n) and isinstance(n.meta[VALUE], torch.Tensor)))}
    again = needed(region, of_backward, handed) if of_backward else set()
    wanted = [n for n in joint.graph.nodes if n in region.forms and n not in late and (
        n in results or (n in handed and any(u in again for u in n.users)))]
    again -= {n for n in again if n in handed and n not in late}
    made: list[tuple[tuple[Tiled, list[fx.Node]], Sequence[fx.Node], bool]] = []
    some: Sequence[fx.Node]
    for some, nodes, backward in ((wanted, needed(region, wanted), False), (of_backward, again, True)):
        if some:
            built = build(region, nodes, some, f"head_{'backward' if backward else 'forward'}", parts)
            if built is None:
                return False
            made.append((built, some, backward))
    for (tiled, arguments), some, backward in made:
        after = readers_of(some)
        anchor = next((n for n in joint.graph.nodes if n in after), some[-1])
        with joint.graph.inserting_before(anchor):
            call = called(joint.graph, tiled, arguments, call_meta(some, backward=backward))
        for k, result in enumerate(some):
            joint.replace(result, item_of(joint, call, k))
    return bool(made)


# -- Groups of rows --------------------------------------------------------------------------------
#
# Ordinary operations on one group of rows after the other. Forward and backward stay apart, and the wide
# values of each group are values of the graph: a schedule keeps those of some groups from the forward to the
# backward, as far as there is room, and computes the others again.

GROUPS = 8
"""Most groups: each has operations of its own, among which planners choose, and smaller products are
slower."""
_Key = tuple[fx.Node, int, int]


def in_groups(joint: Joint, region: Region, seed: fx.Node, apart: Collection[fx.Node]) -> bool:
    """Let a region run in groups of rows. False, and nothing is changed, where it cannot, or where a wide sum
    over the rows is more than a gradient that is added up where it belongs.

    `seed`: its product. `apart`: values of it that its other readers get as before.
    """
    late, results = late_nodes(joint), results_of(joint, region, apart)
    inside = [n for n in joint.graph.nodes if n in needed(region, results)]
    of_backward = [n for n in results if n in late]
    groups = min(GROUPS, default_parts(region, seed.meta[VALUE]))
    if groups < 2 or not of_backward or not _may(joint, region, inside, results):
        return False
    making = _Making(joint, region, seed, set(inside), -(-region.rows // groups))
    for some in ([n for n in results if n not in late], of_backward):
        after = readers_of(some)
        making.anchor = next((n for n in joint.graph.nodes if n in after), some[-1])
        parts: list[list[fx.Node]] = []
        for start in range(0, region.rows, making.step):
            made = making.group(start, [n for n in inside if (n in late) == (some is of_backward)])
            parts.append([made[n] for n in some])
        for result, own in zip(some, zip(*parts, strict=True), strict=True):
            if result in region.sums:
                joint.replace(*making.added_up(result, own))
            else:
                joint.replace(result, making.joined(result, own))
    put_in_order(joint.graph)
    return True


def _may(joint: Joint, region: Region, inside: Sequence[fx.Node], results: Sequence[fx.Node]) -> bool:
    for node in inside:
        for operand, form in region.needs(node).items():
            if operand in region.forms:
                if operand in region.sums:
                    return False
            elif form == TURNED or not isinstance(operand.meta.get(VALUE), torch.Tensor) \
                    or not (form < 2 or operand.meta[VALUE].is_contiguous()):
                return False
    for node in results:
        if node in region.sums:
            if node.meta[VALUE].dim() and not _is_gradient(joint, node):
                return False
        elif region.forms[node] == TURNED or is_view(node):
            return False
    return all(n.meta[VALUE].dtype in (torch.float32, torch.float64) for n in results if n in region.sums)


def _is_gradient(joint: Joint, node: fx.Node) -> bool:
    """Return whether a value is a parameter's gradient, or a summand of one, and nothing else."""
    params = {n for s, n in joint.grads if s.kind == "param"}
    while node not in params:
        user = next(iter(node.users), None)
        if user is None or len(node.users) > 1 or not (is_view(user) or user.target is aten.add.Tensor):
            return False
        node = user
    return not node.users


class _Making:
    def __init__(self, joint: Joint, region: Region, seed: fx.Node, inside: set[fx.Node],
                 step: int) -> None:
        self.graph = joint.graph
        self.region = region
        self._seed = seed
        self.inside = inside
        self.step = step
        """Rows of a group; the last one may have fewer."""
        self.anchor = seed
        """Node before which operations are inserted."""
        self._values: dict[tuple[fx.Node, int], fx.Node] = {}
        """(operation, first row of a group) -> its value there."""
        self._given: dict[_Key, fx.Node] = {}
        """Rows of what comes in, by its form and where they begin."""

    def group(self, start: int, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, fx.Node]:
        """Run some operations on the rows of one group."""
        region, count = self.region, min(self.step, self.region.rows - start)
        for node in nodes:
            forms = region.needs(node)
            operands = {o: self._values[o, start] if o in self.inside else self._rows(o, form, start, count)
                        for o, form in forms.items()}
            before = self.anchor.prev
            with self.graph.inserting_before(self.anchor):
                tile = RowTile(self.graph, count, operands, forms)
                made = emit_sum(node, tile) if node in region.sums else emit(node, region.forms[node], tile)
            self._values[node, start] = made
            while before.next is not self.anchor:
                before = before.next
                self._describe(before, node)
        return {n: self._values[n, start] for n in nodes}

    def added_up(self, result: fx.Node, parts: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node]:
        """Return a sum over all rows (or the last view of it), and the sum of the groups' own values, with
        the same views, so that each part can go to its place by itself."""
        while len(result.users) == 1 and is_view(user := next(iter(result.users))):
            parts = [self._call(user, user.target, part, *user.args[1:]) for part in parts]
            result = user
        whole = parts[0]
        for part in parts[1:]:
            whole = self._call(result, aten.add.Tensor, whole, part)
        return result, whole

    def joined(self, result: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """Return the rows of all groups, joined."""
        whole = self._call(result, aten.cat.default, list(parts))
        shape = list(result.meta[VALUE].shape)
        same = list(whole.meta[VALUE].shape) == shape
        return whole if same else self._call(result, aten.view.default, whole, shape)

    def _rows(self, node: fx.Node, form: int, start: int, count: int) -> fx.Node:
        if form == WHOLE:
            return node
        key = node, form, start
        if key not in self._given:
            value = node.meta[VALUE]
            rows = node if form == 1 else self._call(
                node, aten.view.default, node, [self.region.rows, *value.shape[form:]])
            self._given[key] = self._call(node, aten.slice.Tensor, rows, 0, start, start + count)
        return self._given[key]

    def _call(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args)
        self._describe(node, like)
        return node

    def _describe(self, node: fx.Node, like: fx.Node) -> None:
        """Give a new operation its value, and what is noted of the one that it is made for."""
        backward = is_backward(like) or any(is_backward(n) for n in node.all_input_nodes)
        node.meta = without_descriptor(like.meta) | phase_tag(backward=backward) | {
            VALUE: result_of(node, self._seed)}
