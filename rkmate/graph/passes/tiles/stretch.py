"""A stretch of forward operations, cut along a dimension of each value, and the two computations that it
becomes: its results and its gradients, tile by tile.

The gradients of a tile are derived from its operations by autograd. They are added up where tiles overlap,
and over all tiles for what each of them reads as a whole. A derivative is linear in the gradients that enter
it, so that the sums are the derivative of the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.tiles.banded import Banded, Part, runs_of
from rkmate.graph.passes.tiles.cuts import Band, Need, Piece, piece, shape_of, summand
from rkmate.graph.passes.tiles.tiled import propagate
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import operator_name
from rkmate.torch_seam.trace import operations_of

aten = torch.ops.aten


# -- Stretches -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Port:
    """A value from outside, as one operation of a stretch reads it."""

    node: fx.Node
    """Placeholder in the stretch's graph."""
    of: fx.Node
    """The value in the joint graph."""
    trained: bool
    """Whether the value has a gradient."""


@dataclass(eq=False)
class Stretch:
    """Operations in a graph of their own."""

    about: str
    """The dimension that is cut, in words."""
    graph: fx.Graph
    """The operations on whole values."""
    dims: dict[fx.Node, int]
    """The dimension along which each operation's result is cut."""
    sums: dict[fx.Node, int]
    """Sums over the dimension that is cut: that dimension of their first operand."""
    ports: dict[fx.Node, Port]
    """By placeholder."""
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The operation of the joint graph that each operation is a copy of."""
    results: list[fx.Node] = field(default_factory=list)
    """Operations whose results are read outside."""

    @property
    def operations(self) -> list[fx.Node]:
        """The operations, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def length(self, result: fx.Node) -> int:
        """Return how many elements of the dimension that is cut stand behind a result."""
        return length_of(result, self.dims, self.sums)

    def most_parts(self) -> int:
        """Return the most tiles in which no result's part is empty."""
        return min(map(self.length, self.results))

    def part(self, node: fx.Node, k: int, parts: int) -> Band:
        """Return what tile `k` makes of a result, or of what a sum adds up."""
        size = self.length(node)
        return Band(self.dims.get(node, self.sums.get(node, 0)), size * k // parts, size * (k + 1) // parts)

    def cover(self, k: int, parts: int, results: Sequence[fx.Node]) -> Cover | None:
        """Return what tile `k` computes for some of the results; None if an operation cannot be cut so."""
        bands = {r: self.part(r, k, parts) for r in results if r in self.dims}
        added = [sum_of(r) for r in results if r in self.sums]
        found = spread(self.operations, bands, {n: self.part(n, k, parts) for n in added})
        return None if found is None else self._shared(found)

    def _shared(self, cover: Cover) -> Cover | None:
        """Let each value from outside come in by one part, or whole."""
        around: dict[fx.Node, Band] = {}
        for port in self.ports.values():
            band = cover.bands.get(port.node)
            if band is not None:
                if port.of in around and around[port.of].dim != band.dim:
                    return None
                around[port.of] = around[port.of].around(band) if port.of in around else band
        both = {p.of for p in self.ports.values() if p.node in cover.whole and p.of in around}
        if any(p.trained and p.of in both for p in self.ports.values()):
            return None
        cover.outside = around
        return cover


@dataclass(eq=False)
class Cover:
    """Ranges that one tile computes."""

    bands: dict[fx.Node, Band]
    """The part of each operation's result, and of each value from outside where it is read in parts."""
    whole: set[fx.Node]
    """Values from outside that are read whole."""
    pieces: dict[fx.Node, Piece]
    """The operations."""
    outside: dict[fx.Node, Band] = field(default_factory=dict)
    """The part of each value of the joint graph that comes in."""


def length_of(result: fx.Node, dims: Mapping[fx.Node, int], sums: Mapping[fx.Node, int]) -> int:
    """Return how many elements of the dimension that is cut stand behind a result."""
    if result in dims:
        return shape_of(result)[dims[result]]
    return shape_of(sum_of(result).args[0])[sums[result]]


def sum_of(node: fx.Node) -> fx.Node:
    """Return the sum that an item is the result of, or the sum itself."""
    found: Any = node.args[0] if node.target is operator.getitem else node
    return found  # type: ignore[no-any-return]


def spread(operations: Sequence[fx.Node], bands: dict[fx.Node, Band], sums: Mapping[fx.Node, Band],
           ) -> Cover | None:
    """Return what must be computed for parts of some results; None if an operation cannot be cut so. `sums`:
    for sums, the part of their operand."""
    inside = set(operations)
    whole: set[fx.Node] = set()
    pieces: dict[fx.Node, Piece] = {}
    bands = dict(bands)
    for node in reversed(operations):
        if node not in bands and node not in sums:
            continue
        made = piece(node, bands[node]) if node in bands else summand(node, sums[node])
        if made is None:
            return None
        pieces[node] = made
        for operand, band in made.needs:
            if band is None:
                whole.add(operand)
            elif operand not in bands:
                bands[operand] = band
            elif bands[operand].dim != band.dim:
                return None
            else:
                bands[operand] = bands[operand].around(band)
    if whole & inside or any(isinstance(n.meta[VALUE], (tuple, list)) and any(
            u in bands and bands[u] != bands[n] for u in n.users) for n in inside if n in bands):
        return None
    return Cover(bands, whole, pieces)


# -- One tile --------------------------------------------------------------------------------------

Key = tuple[fx.Node, bool]
"""An argument: a value of the joint graph, and whether tiles read a part of it."""
Input = tuple[Key, int | None]
"""An argument, and the number of the group of ports for which its gradient is wanted."""


@dataclass(eq=False)
class _Writing:
    """Writes a tile's operations into a graph."""

    stretch: Stretch
    cover: Cover
    group_of: Mapping[Port, int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[Input, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation."""
        name = operator_name(target, "item").lstrip("_")
        return self.graph.create_node("call_function", target, args, kwargs, name)

    def get(self, need: Need) -> Any:
        """Return an operand's part in this tile."""
        node, band = need
        port = self.stretch.ports.get(node)
        value = self.values[node] if port is None else self._input(
            ((port.of, band is not None), self.group_of.get(port)))
        if band is None:
            return value
        held = self.cover.bands[node] if port is None else self.cover.outside[port.of]
        if band == held:
            return value
        return self.call(aten.slice.Tensor, value, band.dim, band.start - held.start, band.stop - held.start)

    def _input(self, given: Input) -> fx.Node:
        if given not in self.inputs:
            self.inputs[given] = self.graph.placeholder("x" if given[0][1] else "w")
        return self.inputs[given]

    def run(self, results: Sequence[fx.Node]) -> None:
        """Write all operations that some results need."""
        for node in self.stretch.operations:
            if node in self.cover.pieces:
                self.values[node] = self.cover.pieces[node].write(self)
            elif node in self.stretch.sums and sum_of(node) in self.cover.pieces:
                made = self.values[sum_of(node)]
                self.values[node] = made[0] if isinstance(made, tuple) else made
        self.graph.output(tuple(self.get((r, self.cover.bands[r])) if r in self.cover.bands
                                else self.values[r] for r in results))


def _narrow(value: Any, band: Band | None) -> torch.Tensor:
    found: torch.Tensor = value if band is None else value.narrow(band.dim, band.start, len(band))
    return found


def _run(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    """Return what operations make of the values of their placeholders."""
    env = dict(values)
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        elif node.op == "output":
            return tuple(env[n] for n in node.args[0])
    raise ValueError("a graph without an output")


# -- Forward and backward --------------------------------------------------------------------------


def forward_of(stretch: Stretch, results: Sequence[fx.Node], name: str, parts: int,
               keys: Sequence[Key] | None = None) -> tuple[Banded, list[Key]] | None:
    """Return the results of a stretch as one computation in tiles, and its arguments; None if it cannot run
    in so many."""
    tiles: list[Any] = []
    for k in range(parts):
        cover = stretch.cover(k, parts, results)
        if cover is None:
            return None
        writing = _Writing(stretch, cover, {})
        writing.run(results)
        keys = [key for key, _ in writing.inputs] if keys is None else keys
        graph = _ordered(writing.graph, [writing.inputs.get((key, None)) for key in keys], keys)
        with _mode(keys):
            _describe(graph, [_narrow(of.meta[VALUE], cover.outside[of] if cut else None)
                              for of, cut in keys])
        tiles.append((graph, tuple(cover.outside[of] if cut else None for of, cut in keys),
                      tuple(cover.bands.get(r) for r in results)))
    assert keys is not None
    made = [Part(tuple(v.shape), v.dtype, v.device, stretch.dims.get(r))
            for r in results for v in [r.meta[VALUE]]]
    kept = list(keys)

    def coarser(fewer: int) -> Banded | None:
        found = forward_of(stretch, results, name, fewer, kept)
        return None if found is None else found[0]

    return Banded(name, stretch.about, parts, runs_of(tiles), tuple(made), coarser), kept


def backward_of(stretch: Stretch, entering: Sequence[fx.Node], groups: Sequence[Sequence[Port]], name: str,
                parts: int, keys: Sequence[Key] | None = None) -> tuple[Banded, list[Key]] | None:
    """Return gradients of a stretch as one computation in tiles, and its arguments, which the gradients of
    `entering` results follow; None if it cannot run in so many. `groups`: of ports, with a gradient for
    each."""
    group_of = {port: g for g, ports in enumerate(groups) for port in ports}
    tiles: list[Any] = []
    known: dict[str, fx.Graph] = {}
    for k in range(parts):
        cover = stretch.cover(k, parts, entering)
        if cover is None:
            return None
        writing = _Writing(stretch, cover, group_of)
        writing.run(entering)
        if len({g for _, g in writing.inputs} - {None}) < len(groups):
            return None
        if keys is None:
            keys = list(dict.fromkeys(key for key, _ in writing.inputs))
        takes = [*(cover.outside[of] if cut else None for of, cut in keys),
                 *(cover.bands.get(r) for r in entering)]
        text = f"{writing.graph}{[b and (b.dim, len(b)) for b in takes]}"
        if text not in known:
            with _mode(keys):
                like = [_narrow(v, b) for v, b in zip(
                    [*(of.meta[VALUE] for of, _ in keys), *(r.meta[VALUE] for r in entering)], takes,
                    strict=True)]
                like[len(keys):] = [torch.empty(v.shape, dtype=v.dtype, device=v.device)
                                    for v in like[len(keys):]]
            known[text] = _gradients(writing, keys, len(groups), like)
        gives = tuple(cover.outside.get(ports[0].of) for ports in groups)
        tiles.append((known[text], tuple(takes), gives))
    assert keys is not None
    made = []
    for g, ports in enumerate(groups):
        value, bands = ports[0].of.meta[VALUE], [t[2][g] for t in tiles]
        made.append(Part(tuple(value.shape), value.dtype, value.device,
                         None if bands[0] is None else bands[0].dim,
                         bands[0] is not None and not _cover_once(bands, value.shape[bands[0].dim])))
    kept = list(keys)

    def coarser(fewer: int) -> Banded | None:
        found = backward_of(stretch, entering, groups, name, fewer, kept)
        return None if found is None else found[0]

    return Banded(name, stretch.about, parts, runs_of(tiles), tuple(made), coarser), kept


def _gradients(writing: _Writing, keys: Sequence[Key], groups: int, like: Sequence[torch.Tensor]) -> fx.Graph:
    """Return the gradients of one tile, derived from its operations. `like`: its arguments."""
    at = {key: k for k, key in enumerate(keys)}

    def derive(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, leaves = {}, {}
        for (key, group), node in writing.inputs.items():
            values[node] = given[at[key]].detach()
            if group is not None:
                leaves[group] = values[node].requires_grad_()
        results = _run(writing.graph, values)
        found = _derived(results, [leaves[g] for g in range(groups)], given[len(keys):])
        return tuple(torch.zeros_like(leaves[g]) if made is None else made for g, made in enumerate(found))

    derived = operations_of(derive, like)
    graph = _ordered(derived, [n for n in derived.nodes if n.op == "placeholder"], [
        *keys, *((None, v.shape == ()) for v in like[len(keys):])])
    with like[0].fake_mode:                                     # type: ignore[attr-defined]
        _describe(graph, like)
    return graph


def derivative(stretch: Stretch, entering: Sequence[fx.Node], ports: Sequence[Port],
               ) -> tuple[fx.Graph, list[fx.Node | None]]:
    """Return the gradients of a whole stretch as autograd derives them, and the node of each port's gradient.
    The placeholders are the stretch's own, in their order, then the gradients that enter."""
    inputs = [n for n in stretch.graph.nodes if n.op == "placeholder"]
    mode = inputs[0].meta[VALUE].fake_mode
    with mode:
        like = [torch.empty_like(r.meta[VALUE]) for r in entering]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in stretch.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[r] for r in entering))

    def derive(*given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values = {node: value.detach() for node, value in zip(inputs, given, strict=False)}
        for port in ports:
            values[port.node].requires_grad_()
        results = _run(graph, {copies[n]: v for n, v in values.items()})
        return _derived(results, [values[p.node] for p in ports], given[len(inputs):])

    derived = operations_of(derive, [*(n.meta[VALUE] for n in inputs), *like])
    output: Any = derived.output_node().args[0]
    return derived, list(output)


def _derived(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor],
             entering: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of some values; None where no result depends on one."""
    pairs = [(r, g) for r, g in zip(results, entering, strict=True) if r.requires_grad]
    if not pairs or not leaves:
        return (None,) * len(leaves)
    found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        [r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return found


def _cover_once(bands: Sequence[Band], size: int) -> bool:
    """Return whether ranges follow one another, from the beginning to the end."""
    return bands[0].start == 0 and bands[-1].stop == size and all(
        a.stop == b.start for a, b in zip(bands, bands[1:], strict=False))


def _ordered(graph: fx.Graph, inputs: Sequence[fx.Node | None], keys: Sequence[Any]) -> fx.Graph:
    """Return a copy of a graph whose placeholders are in the order of arguments."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, (of, cut) in zip(inputs, keys, strict=True):
        name = ("x" if cut else "w") if of is not None else "grad"
        new = made.placeholder(name)
        if node is not None:
            copies[node] = new
    for node in graph.nodes:
        if node.op == "call_function":
            name = operator_name(node.target, "item").lstrip("_")
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            target = aten.reshape.default if node.target in _VIEWS else node.target
            copies[node] = made.create_node("call_function", target, args, kwargs, name)
        elif node.op == "output":
            made.output(tuple(copies[n] for n in node.args[0]))
    return made


_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Views of what kernels may lay out otherwise than the trace says: reshape then copies."""


def _describe(graph: fx.Graph, like: Sequence[torch.Tensor]) -> None:
    for node, value in zip([n for n in graph.nodes if n.op == "placeholder"], like, strict=True):
        node.meta[VALUE] = value
    propagate(graph)


def _mode(keys: Sequence[Key]) -> Any:
    return keys[0][0].meta[VALUE].fake_mode
