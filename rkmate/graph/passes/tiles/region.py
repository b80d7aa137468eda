"""A region of the joint graph: operations that work row by row, from a wide product to the next narrow value,
and the test whether its backward is linear in one incoming gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes.joint import makers_of, readers_of, shape_of, value_of
from rkmate.graph.passes.tiles.rules import TURNED, WHOLE, Forms, lead_of, row_numel, sums, takes
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import record_of

aten = torch.ops.aten


@dataclass
class Region:
    """Operations with the form of each one's result, while it grows."""

    rows: int
    width: int
    """Numbers per row of the product that it has grown from; half as many are wide."""
    forms: dict[fx.Node, int] = field(default_factory=dict)
    sums: set[fx.Node] = field(default_factory=set)
    """Operations of the region that sum over all rows."""

    def wide(self, node: fx.Node) -> bool:
        """Return whether a value has about as many numbers per row."""
        return 2 * row_numel(node, self.rows) >= self.width

    def needs(self, node: fx.Node) -> Forms:
        """Return the forms in which an operation of the region takes its operands."""
        found = sums(node, self.rows) if node in self.sums else takes(node, self.forms[node], self.rows)
        assert found is not None
        return found

    def fit(self, node: fx.Node) -> bool:
        """Take an operation in that reads values of the region. False: it does not work row by row."""
        shape = shape_of(node)
        if node.op != "call_function" or not isinstance(value_of(node), torch.Tensor):
            return False
        lead = lead_of(shape, self.rows)
        forms = [f for f in (lead, TURNED if len(shape) == 2 and shape[1] == self.rows else None)
                 if f is not None]
        for form in forms:
            if self._agrees(takes(node, form, self.rows)):
                self.forms[node] = form
                return True
        if self._agrees(sums(node, self.rows)):
            self.forms[node] = WHOLE
            self.sums.add(node)
            return True
        return False

    def _agrees(self, needed: Forms | None) -> bool:
        """Return whether operands may come in the forms that are needed."""
        return needed is not None and all(
            form == self.forms[n] if n in self.forms
            else form != TURNED or (n.op == "call_function" and takes(n, TURNED, self.rows) is not None)
            for n, form in needed.items())

    def results(self, leaving: Collection[fx.Node]) -> list[fx.Node]:
        """Return the region's values that others read, or that leave the graph."""
        return [n for n in self.forms if n in leaving or any(u not in self.forms for u in n.users)]


def grow(seed: fx.Node, entering: Iterable[fx.Node] = ()) -> Region:
    """Return the region around a wide product: its readers until they are narrow, and the operations that
    make their other wide operands. `entering`: values whose readers belong to it, too."""
    shape = shape_of(seed)
    region = Region(shape[0], shape[1])
    region.forms[seed] = 1
    todo = [seed, *(u for n in entering for u in n.users if region.fit(u))]
    while todo:
        node = todo.pop()
        if isinstance(node.meta.get(VALUE), (tuple, list)) or region.wide(node):
            for user in node.users:
                if user not in region.forms and region.fit(user):
                    todo.append(user)
        for operand, form in region.needs(node).items():
            if form != WHOLE and operand not in region.forms \
                    and (form == TURNED or region.wide(operand)) and operand.op == "call_function" \
                    and region._agrees(takes(operand, form, region.rows)):
                region.forms[operand] = form
                todo.append(operand)
    return region


def seeds_of(graph: fx.Graph, is_seed: Callable[[fx.Node], bool],
             region_of: Callable[[fx.Node], Region | None]) -> list[fx.Node]:
    """Return the seeds that have a region and are not in the region of an earlier seed."""
    found: list[fx.Node] = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in taken and is_seed(node):
            region = region_of(node)
            if region is not None:
                found.append(node)
                taken.update(region.forms)
    return found


def close(region: Region) -> bool:
    """Take in what stands between operations of the region. False: it does not work row by row."""
    between = readers_of(region.forms) & makers_of(region.forms)
    graph = next(iter(region.forms)).graph
    return all(region.fit(n) for n in graph.nodes if n in between and n not in region.forms)


def needed(region: Region, results: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the operations of the region that results need; those in `stop` exist already."""
    found: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [n for n in node.all_input_nodes if n in region.forms and n not in stop]
    return found


# -- Linear backwards ------------------------------------------------------------------------------

_IN_FIRST = {getattr(aten, name) for name in (
    "_to_copy", "clone", "neg", "sum", "mean", "expand", "slice_backward", "select_backward", "cumsum",
    "nll_loss_backward", "_log_softmax_backward_data", "_softmax_backward_data", "tanh_backward",
    "sigmoid_backward", "gelu_backward", "silu_backward", "threshold_backward", "leaky_relu_backward",
    "elu_backward", "hardtanh_backward", "gather", "index", "index_select")}
"""Linear in the first operand, whatever the others are, so long as they do not depend on the gradient."""
_IN_ONE = {aten.mul, aten.mm, aten.bmm}
"""Linear in each operand."""
_TOGETHER = {aten.add, aten.sub, aten.cat}
"""Linear where all operands are."""


def is_linear(node: fx.Node, late: Collection[fx.Node]) -> bool:
    """Return whether an operation's result is linear in the gradient, if its operands among `late` are."""
    args: tuple[Any, ...] = tuple(node.args)
    packet: Any = getattr(node.target, "overloadpacket", None)
    if is_zero(node):
        return True
    given = [n for n in node.all_input_nodes if n in late and not is_zero(n)]
    first = args[0] if args else None
    only_first = given == [first] and args.count(first) == 1
    record = record_of(node.target)
    if is_view(node) or packet in _IN_FIRST or (record is not None and record.linear):
        return only_first
    if packet in _IN_ONE:
        return len(given) == 1 and args.count(given[0]) == 1
    if packet is aten.div:
        return only_first
    if packet in _TOGETHER:
        operands = [n for a in args[:2] for n in (a if isinstance(a, (list, tuple)) else [a])
                    if not isinstance(n, int) or packet is not aten.cat]
        return all(isinstance(n, fx.Node) and (n in late or is_zero(n)) for n in operands)
    if packet is aten.where:
        return args[0] not in late and all(
            isinstance(n, fx.Node) and (n in late or is_zero(n)) for n in args[1:3])
    if packet in (aten.masked_fill, aten.scatter) and not isinstance(args[-1], fx.Node):
        return only_first and bool(args[-1] == 0)
    if packet in (aten.scatter, aten.scatter_add):
        return args[2] not in late and all(
            isinstance(n, fx.Node) and (n in late or is_zero(n)) for n in (first, args[3]))
    if packet is aten.constant_pad_nd:
        return only_first and (len(args) < 3 or bool(args[2] == 0))
    return False


def is_zero(node: Any) -> bool:
    """Return whether a value consists of zeros."""
    if not isinstance(node, fx.Node):
        return False
    target = node.target
    if target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    if target in (aten.full.default, aten.full_like.default):
        return bool(node.args[1] == 0)
    return target is aten.scalar_tensor.default and bool(node.args[0] == 0)
