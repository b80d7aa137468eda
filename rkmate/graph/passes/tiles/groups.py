"""A region of the joint graph as ordinary operations on a few groups of rows, one group after the other.

Forward and backward stay apart, and the wide values of each group are values of the graph: a schedule keeps
those of some groups from the forward to the backward, as far as there is room, and computes the others again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.graph.passes.tiles.build import default_parts
from rkmate.graph.passes.tiles.forms import TURNED, WHOLE
from rkmate.graph.passes.tiles.region import Region, needed, readers_of
from rkmate.graph.passes.tiles.rewrite import late_nodes, put_in_order, results_of
from rkmate.graph.passes.tiles.rules import Tile, emit
from rkmate.graph.passes.tiles.sums import emit_sum
from rkmate.torch_seam.nodes import VALUE, phase_tag, without_descriptor

aten = torch.ops.aten
GROUPS = 8
"""Most groups: each has operations of its own, among which planners choose, and smaller products are
slower."""
_Key = tuple[fx.Node, int, int]


def in_groups(work: Joint, region: Region, seed: fx.Node, apart: Collection[fx.Node]) -> bool:
    """Let a region run in groups of rows. False, and nothing is changed, where it cannot, or where a wide sum
    over the rows is more than a gradient that is added up where it belongs.

    `seed`: its product. `apart`: values of it that its other readers get as before.
    """
    late, results = late_nodes(work), results_of(work, region, apart)
    inside = [n for n in work.graph.nodes if n in needed(region, results)]
    of_backward = [n for n in results if n in late]
    groups = min(GROUPS, default_parts(region, seed.meta[VALUE]))
    if groups < 2 or not of_backward or not _may(work, region, inside, results):
        return False
    making = _Making(work, region, seed, set(inside), -(-region.rows // groups))
    for some in ([n for n in results if n not in late], of_backward):
        after = readers_of(some)
        making.anchor = next((n for n in work.graph.nodes if n in after), some[-1])
        parts: list[list[fx.Node]] = []
        for start in range(0, region.rows, making.step):
            made = making.group(start, [n for n in inside if (n in late) == (some is of_backward)])
            parts.append([made[n] for n in some])
        for result, own in zip(some, zip(*parts, strict=True), strict=True):
            if result in region.sums:
                work.replace(*making.added_up(result, own))
            else:
                work.replace(result, making.joined(result, own))
    put_in_order(work.graph)
    return True


def _may(work: Joint, region: Region, inside: Sequence[fx.Node], results: Sequence[fx.Node]) -> bool:
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
            if node.meta[VALUE].dim() and not _is_gradient(work, node):
                return False
        elif region.forms[node] == TURNED or is_view(node):
            return False
    return all(n.meta[VALUE].dtype in (torch.float32, torch.float64) for n in results if n in region.sums)


def _is_gradient(work: Joint, node: fx.Node) -> bool:
    """Whether a value is a parameter's gradient, or a summand of one, and nothing else."""
    params = {n for s, n in work.grads if s.kind == "param"}
    while node not in params:
        user = next(iter(node.users), None)
        if user is None or len(node.users) > 1 or not (is_view(user) or user.target is aten.add.Tensor):
            return False
        node = user
    return not node.users


class _Making:
    def __init__(self, work: Joint, region: Region, seed: fx.Node, inside: set[fx.Node],
                 step: int) -> None:
        self.graph = work.graph
        self.region = region
        self._seed = seed
        self.inside = inside
        self.step = step
        """Rows of a group; the last one may have fewer."""
        self.anchor = seed
        """What to insert before."""
        self._values: dict[tuple[fx.Node, int], fx.Node] = {}
        """Of each operation, in the group that begins at a row."""
        self._given: dict[_Key, fx.Node] = {}
        """Rows of what comes in, by its form and where they begin."""

    def group(self, start: int, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, fx.Node]:
        """Some operations on one group's rows."""
        region, count = self.region, min(self.step, self.region.rows - start)
        for node in nodes:
            forms = region.needs(node)
            operands = {o: self._values[o, start] if o in self.inside else self._rows(o, form, start, count)
                        for o, form in forms.items()}
            before = self.anchor.prev
            with self.graph.inserting_before(self.anchor):
                tile = Tile(self.graph, count, operands, forms, region.rows)
                made = emit_sum(node, tile) if node in region.sums else emit(node, region.forms[node], tile)
            self._values[node, start] = made
            while before.next is not self.anchor:
                before = before.next
                self._describe(before, node)
        return {n: self._values[n, start] for n in nodes}

    def added_up(self, result: fx.Node, parts: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node]:
        """A sum over all rows, or what is only another view of it, and the sum of the groups' own: of views
        each, so that each part can go where it belongs by itself."""
        while len(result.users) == 1 and is_view(user := next(iter(result.users))):
            parts = [self._call(user, user.target, part, *user.args[1:]) for part in parts]
            result = user
        whole = parts[0]
        for part in parts[1:]:
            whole = self._call(result, aten.add.Tensor, whole, part)
        return result, whole

    def joined(self, result: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """The rows of all groups."""
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
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
        backward = is_backward(like) or any(is_backward(n) for n in node.all_input_nodes)
        with self._seed.meta[VALUE].fake_mode:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta = without_descriptor(like.meta) | phase_tag(backward=backward) | {VALUE: value}
