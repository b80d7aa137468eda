"""A region of the joint graph: what works row by row, from a wide product to what is narrow again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import fx

from rkmate.graph.passes.tiles.forms import TURNED, WHOLE, lead_of, row_numel, shape_of
from rkmate.graph.passes.tiles.rules import Forms, takes
from rkmate.graph.passes.tiles.sums import sums
from rkmate.torch_seam.nodes import VALUE


@dataclass
class Region:
    """Operations with the form of each one's result, while it grows."""

    rows: int
    width: int
    """Numbers per row of the product that it has grown from; half as many are wide."""
    forms: dict[fx.Node, int] = field(default_factory=dict)
    sums: set[fx.Node] = field(default_factory=set)
    """Those of its operations that sum over all rows."""

    def wide(self, node: fx.Node) -> bool:
        """Whether a value has about as many numbers per row."""
        return 2 * row_numel(node, self.rows) >= self.width

    def needs(self, node: fx.Node) -> Forms:
        """The forms in which one of its operations takes its operands."""
        found = sums(node, self.rows) if node in self.sums else takes(node, self.forms[node], self.rows)
        assert found is not None
        return found

    def fit(self, node: fx.Node) -> bool:
        """Take an operation in that reads values of the region. False: it does not work row by row."""
        shape = shape_of(node)
        if node.op != "call_function" or shape is None:
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
        """Whether operands may come in the forms that are needed."""
        return needed is not None and all(
            form == self.forms[n] if n in self.forms
            else form != TURNED or (n.op == "call_function" and takes(n, TURNED, self.rows) is not None)
            for n, form in needed.items())

    def results(self, leaving: Collection[fx.Node]) -> list[fx.Node]:
        """Its values that others read, or that leave the graph."""
        return [n for n in self.forms if n in leaving or any(u not in self.forms for u in n.users)]


def grow(seed: fx.Node, entering: Iterable[fx.Node] = ()) -> Region:
    """The region around a wide product: its readers until they are narrow, and what makes their other wide
    operands. `entering`: values whose readers belong to it, too."""
    shape = shape_of(seed)
    assert shape is not None
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
    """The seeds that have a region, none of them in the region of one before."""
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
    between = _reached(region.forms, lambda n: n.users) & _reached(region.forms, lambda n: n.all_input_nodes)
    graph = next(iter(region.forms)).graph
    return all(region.fit(n) for n in graph.nodes if n in between and n not in region.forms)


def needed(region: Region, results: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The operations of the region that results need; those in `stop` are there already."""
    found: set[fx.Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [n for n in node.all_input_nodes if n in region.forms and n not in stop]
    return found


def readers_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that depends on some values, themselves left out."""
    return _reached(nodes, lambda n: n.users)


def makers_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that some values depend on, themselves left out."""
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
