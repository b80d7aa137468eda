"""The operations of one tile, what each of them overwrites and frees, and their statements in Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.in_place import InPlace, in_place_ways
from rkmate.graph.passes.joint import owner_of
from rkmate.graph.passes.node_calls import call_of, operator_of
from rkmate.ir.calls import Writer
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


# -- The operations of one tile --------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """An operation of a tile."""

    node: fx.Node
    way: InPlace | None
    """The way in which the operation writes over an operand that ends with it; None if it does not."""
    ends: tuple[fx.Node, ...]
    """Values that nobody reads after it."""


def steps_of(graph: fx.Graph, held: Collection[fx.Node] = ()) -> tuple[Step, ...]:
    """Return the operations of a tile's graph. `held`: results that are put where they belong after the last
    operation."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    at = {n: k for k, n in enumerate(nodes)}
    # A result is put where it belongs at once, so that it counts as read where it is made.
    last = {n: len(nodes) - 1 if n in held else max((at[u] for u in n.users if u in at), default=at[n])
            for n in nodes}
    owner = {n: owner_of(n) for n in graph.nodes if n.op != "output"}
    storage_ends: dict[fx.Node, int] = {}
    for n in nodes:
        storage_ends[owner[n]] = max(storage_ends.get(owner[n], 0), len(nodes) if n in held else last[n])
    made = []
    for k, node in enumerate(nodes):
        way = next((w for w in in_place_ways(node, owner.__getitem__)
                    if storage_ends.get(owner[_argument(node, w)]) == k
                    and owner[_argument(node, w)].op == "call_function"), None)
        if way is not None:                    # the result lives there from now on
            old = owner[_argument(node, way)]
            storage_ends[old] = storage_ends[owner[node]]
            owner = {n: old if o is node else o for n, o in owner.items()}
        ends = dict.fromkeys([n for n in node.all_input_nodes if n in last and last[n] == k])
        made.append(Step(node, way, (*ends, *((node,) if last[node] == k else ()))))
    return tuple(made)


def _argument(node: fx.Node, way: InPlace) -> fx.Node:
    found = node.args[way.argument]
    assert isinstance(found, fx.Node)
    return found


# -- Results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A result of a tiled computation: put together from the tiles' parts, or summed up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_sum(self) -> bool:
        """Whether the tiles' parts are summed up."""
        raise NotImplementedError

    @property
    def sums_in(self) -> torch.dtype:
        """The type in which parts are summed up: single precision at least."""
        floats = self.dtype.is_floating_point and self.is_sum
        return torch.promote_types(self.dtype, torch.float32) if floats else self.dtype


@dataclass(frozen=True)
class Give(Result):
    """A result of a computation that runs a few rows at a time."""

    lead: int
    """Number of leading dimensions that are rows, which tiles fill one after the other; 0: the tiles' parts
    are summed up, in single precision at least."""

    @property
    def is_sum(self) -> bool:
        """Whether the tiles' parts are summed up."""
        return not self.lead


def products_of(graph: fx.Graph, gives: Sequence[Result]) -> dict[int, fx.Node]:
    """Return the results of a tile's graph that are sums of products, by number: each product is added to the
    sum in place."""
    made: Any = graph.output_node().args[0]
    return {k: node for k, (node, give) in enumerate(zip(made, gives, strict=True))
            if give.is_sum and node.target is aten.mm.default and len(node.users) == 1
            and node.meta[VALUE].dtype == give.sums_in and made.count(node) == 1}


def peak_bytes(graph: fx.Graph, gives: Sequence[Result], inside: Callable[[fx.Node], int],
               held: Collection[fx.Node] = ()) -> int:
    """Return the most bytes that a tile's own values take at once. `gives`: its results. `inside`: the
    temporaries of an operation. `held`: see `steps_of`."""
    added = products_of(graph, gives).values()
    live = peak = 0
    taken: dict[fx.Node, int] = {}
    count: dict[fx.Node, int] = {}
    owner: dict[fx.Node, fx.Node] = {}
    for step in steps_of(graph, held):
        node = step.node
        base = _argument(node, step.way) if step.way is not None else owner_of(node)
        owner[node] = owner.get(base, base) if base is not node else node
        if owner[node] is node:
            taken[node] = 0 if node in added else _bytes(node.meta[VALUE])
            live += taken[node]
        count[owner[node]] = count.get(owner[node], 0) + 1
        peak = max(peak, live + inside(node))
        for n in step.ends:
            if n in owner:
                count[owner[n]] -= 1
                if not count[owner[n]]:
                    live -= taken.pop(owner[n], 0)
    return peak


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.untyped_storage().nbytes())
    return 0                                   # several results are counted where they are taken apart


# -- Statements ------------------------------------------------------------------------------------


def new_tensor(kind: str, shape: list[int], dtype: torch.dtype, device: torch.device, write: Writer,
               strides: tuple[int, ...] | None = None) -> str:
    """Return a call that makes a tensor of zeros, or one without values; contiguous without `strides`."""
    more = f'dtype={dtype}, device="{write.device(str(device))}")'
    if strides is None:
        return f"torch.{kind}({shape}, {more}"
    return f"torch.empty_strided({shape}, {strides}, {more}{'.zero_()' if kind == 'zeros' else ''}"


def add_product(name: str, node: fx.Node, write: Writer, more: str = "") -> str:
    """Return a product that is added to a result in place, as a line of source."""
    a, b = (n.name for n in node.args)  # type: ignore[union-attr]
    return f"{write.callee(operator_of(aten.addmm.out))}({name}, {a}, {b}{more}, out={name})"


def statement(step: Step, write: Writer) -> str:
    """Return an operation of a tile as a line of source."""
    node, args, kwargs, target = step.node, list(step.node.args), dict(step.node.kwargs), step.node.target
    if step.way is not None:
        target = step.way.target
        if step.way.keyword is not None:
            kwargs[step.way.keyword] = node.args[step.way.argument]
        if step.way.swapped:
            args[:2] = reversed(args[:2])
    return f"{node.name} = {write(call_of(target, args, kwargs))}"
