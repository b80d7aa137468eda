"""A stretch of forward operations, cut along a dimension of each value, and the two computations that it
becomes: its results and its gradients, tile by tile.

The gradients of a tile are derived from its operations by autograd. They are added up where tiles overlap,
and over all tiles for what each of them reads as a whole. A derivative is linear in the gradients that enter
it, so that the sums are the derivative of the whole.

Norms that mix tiles have a pass over all tiles for their statistics, which later passes read as whole values.
In the backward, a pass has the gradients of the last norm's statistics, the next one those of the norm before
it, and so on. In the last pass, statistics are results like others, whose gradients enter. So what comes to
an operation from a norm's result and from its statistics is added up before it goes on, as in the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import RESHAPES, is_view
from rkmate.graph.passes.joint import shape_of
from rkmate.graph.passes.tiles.banded import Banded, Part, Tile, TileRun, runs_of
from rkmate.graph.passes.tiles.cuts import piece, summand, summed
from rkmate.graph.passes.tiles.matching import canonical
from rkmate.graph.passes.tiles.norms import counted, finished, norm_of
from rkmate.graph.passes.tiles.pieces import Band, Need, Piece, same
from rkmate.graph.passes.tiles.tiled import propagate
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import operator_name
from rkmate.torch_seam.tensors import contiguous_strides
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
    """Sums over the dimension that is cut: that dimension of the operand that is summed up."""
    ports: dict[fx.Node, Port]
    """Placeholder -> its port."""
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The operation of the joint graph that each operation is a copy of."""
    results: list[fx.Node] = field(default_factory=list)
    """Operations whose results are read outside."""
    statistics_of: dict[fx.Node, dict[int, fx.Node]] = field(default_factory=dict)
    """Norms of the joint graph whose statistics tiles compute, and their other results by number."""
    _statistics: dict[fx.Node, tuple[Port, Port]] = field(default_factory=dict)

    def statistics(self, norm: fx.Node) -> tuple[Port, Port]:
        """Return the mean and the variance of what a norm reads, as values that come in."""
        if norm not in self._statistics:
            found = norm_of(norm)
            assert found is not None
            like = found.x.meta[VALUE]
            values = [fx.Graph().placeholder(name) for name in ("mean", "variance")]
            with like.fake_mode:
                for value in values:
                    value.meta[VALUE] = torch.empty(found.shape, dtype=like.dtype, device=like.device)
            mean, variance = (Port(norm, value, True) for value in values)
            self._statistics[norm] = mean, variance
        return self._statistics[norm]

    def norms(self, results: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Return the norms that mix tiles of some results, in order, and the dimension that is cut."""
        cover = self.cover(0, 1, results, {})
        return {} if cover is None else {n: cover.bands[n].dim for n in self.operations
                                         if n in cover.pieces and cover.pieces[n].mixes}

    @property
    def operations(self) -> list[fx.Node]:
        """The operations, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def length(self, result: fx.Node) -> int:
        """Return how many elements of the dimension that is cut stand behind a result."""
        return length_of(result, self.dims, self.sums)

    def most_parts(self) -> int:
        """Return the most tiles in which no result's part is empty."""
        return min([*map(self.length, self.results), *(
            shape_of(n)[dim] for n, dim in self.norms(self.results).items())])

    def part(self, node: fx.Node, k: int, parts: int) -> Band:
        """Return what tile `k` makes of a result, or of what a sum adds up."""
        return _part(self.length(node), self.dims.get(node, self.sums.get(node, 0)), k, parts)

    def cover(self, k: int, parts: int, results: Sequence[fx.Node], norms: Mapping[fx.Node, int],
              ) -> Cover | None:
        """Return what tile `k` computes for some of the results, and for the statistics of norms that are cut
        in a dimension; None if an operation cannot be cut so."""
        bands = {r: self.part(r, k, parts) for r in results if r in self.dims}
        added = [sum_of(r) for r in results if r in self.sums]
        found = spread(self.operations, bands, {n: self.part(n, k, parts) for n in added}, {
            n: _part(shape_of(n)[dim], dim, k, parts) for n, dim in norms.items()})
        if found is not None:
            found.own = {r: self.part(r, k, parts) for r in results if r in self.dims}
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
    own: dict[fx.Node, Band] = field(init=False, default_factory=dict)
    """The part of each result that no other tile makes: others may compute more of it, as its readers need
    it."""
    whole: set[fx.Node]
    """Values from outside that are read whole."""
    pieces: dict[fx.Node, Piece]
    """Operation -> its piece."""
    counted: dict[fx.Node, Piece]
    """Norm -> what the tile adds to its statistics."""
    outside: dict[fx.Node, Band] = field(default_factory=dict)
    """The part of each value of the joint graph that comes in."""

    def add(self, needs: Iterable[Need]) -> bool:
        """Add parts of operands. False: one of them is cut in another dimension already."""
        for operand, band in needs:
            held = self.bands.get(operand)
            if band is None:
                self.whole.add(operand)
            elif held is not None and held.dim != band.dim:
                return False
            else:
                self.bands[operand] = band if held is None else held.around(band)
        return True


def _part(size: int, dim: int, k: int, parts: int) -> Band:
    return Band(dim, size * k // parts, size * (k + 1) // parts)


def length_of(result: fx.Node, dims: Mapping[fx.Node, int], sums: Mapping[fx.Node, int]) -> int:
    """Return how many elements of the dimension that is cut stand behind a result."""
    if result in dims:
        return shape_of(result)[dims[result]]
    return shape_of(summed(sum_of(result)))[sums[result]]


def sum_of(node: fx.Node) -> fx.Node:
    """Return the sum that an item is the result of, or the sum itself."""
    found: Any = node.args[0] if node.target is operator.getitem else node
    return found  # type: ignore[no-any-return]


def spread(operations: Sequence[fx.Node], bands: dict[fx.Node, Band], sums: Mapping[fx.Node, Band],
           norms: Mapping[fx.Node, Band]) -> Cover | None:
    """Return what must be computed for parts of some results; None if an operation cannot be cut so. `sums`,
    `norms`: for sums, and for norms whose statistics are computed, the part of their operand."""
    inside = set(operations)
    cover = Cover(dict(bands), set(), {}, {})
    for node in reversed(operations):
        made: list[tuple[dict[fx.Node, Piece], Piece | None]] = []
        if node in cover.whole and node not in cover.bands and is_view(node):
            made.append((cover.pieces, same(node, [])))
        elif node in cover.bands or node in sums:
            made.append((cover.pieces, piece(node, cover.bands[node]) if node in cover.bands
                         else summand(node, sums[node])))
        if node in norms:
            made.append((cover.counted, counted(node, norms[node])))
        for pieces, one in made:
            if one is None or not cover.add(one.needs):
                return None
            pieces[node] = one
    viewed = {n for n in cover.pieces if n in cover.whole and n not in cover.bands}
    if (cover.whole & inside) - viewed or any(isinstance(n.meta[VALUE], (tuple, list)) and any(
            u in cover.bands and cover.bands[u] != cover.bands[n] for u in n.users)
            for n in inside if n in cover.bands):
        return None
    return cover


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
    unknown: fx.Node | None = None
    """The norm whose statistics are computed in the forward."""
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

    def statistics(self, norm: fx.Node) -> tuple[Any, Any] | None:
        """Return mean and variance of what a norm reads; None while tiles compute them."""
        if norm is self.unknown:
            return None
        mean, variance = (self._input(((port.of, False), self.group_of.get(port)))
                          for port in self.stretch.statistics(norm))
        return mean, variance

    def _input(self, given: Input) -> fx.Node:
        if given not in self.inputs:
            self.inputs[given] = self.graph.placeholder("x" if given[0][1] else "w")
        return self.inputs[given]

    def run(self, results: Sequence[fx.Node]) -> None:
        """Write all operations that some results need, and the statistics of norms."""
        statistics: list[fx.Node] = []
        for node in self.stretch.operations:
            if node in self.cover.pieces:
                self.values[node] = self.cover.pieces[node].write(self)
            elif node in self.stretch.sums and sum_of(node) in self.cover.pieces:
                made = self.values[sum_of(node)]
                self.values[node] = made[0] if isinstance(made, tuple) else made
            if node in self.cover.counted:
                statistics += self.cover.counted[node].write(self)
        own = self.cover.own
        self.graph.output((*(self.get((r, own[r])) if r in own else self.values[r] for r in results),
                           *statistics))


def _part_like(value: Any, dim: int | None, overlaps: bool = False) -> Part:
    """Return a result that replaces a value. What reads it was described with the value's strides, and may
    overwrite it because of them."""
    with value.fake_mode:
        strides = tuple(torch.empty_like(value).stride())
    plain = dim is None or strides == contiguous_strides(value.shape)
    return Part(tuple(value.shape), value.dtype, value.device, dim, overlaps, None if plain else strides)


def _narrow(value: Any, band: Band | None) -> torch.Tensor:
    found: torch.Tensor = value if band is None else value.narrow(band.dim, band.start, len(band))
    return found


def _run(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    """Return what operations make of the values of their placeholders."""
    env = dict(values)
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            target, args = canonical(node.target, args)
            env[node] = target(*args, **kwargs)
        elif node.op == "output":
            return tuple(env[n] for n in node.args[0])
    raise ValueError("a graph without an output")


# -- Forward and backward --------------------------------------------------------------------------

_NONE: Mapping[Any, int] = MappingProxyType({})


def _written(stretch: Stretch, results: Sequence[fx.Node], parts: int, *,
             group_of: Mapping[Port, int] = _NONE, norms: Mapping[fx.Node, int] = _NONE,
             unknown: fx.Node | None = None) -> list[_Writing] | None:
    """Return the operations of each tile of a pass; None if it cannot run in so many. `norms`: whose
    statistics are results, too, with the dimension that is cut."""
    found = []
    for k in range(parts):
        cover = stretch.cover(k, parts, results, norms)
        if cover is None:
            return None
        found.append(_Writing(stretch, cover, group_of, unknown))
        found[-1].run(results)
    return found


def _taken(writing: _Writing, keys: Sequence[Key]) -> list[Band | None]:
    """Return the part of each argument that a tile reads; None: the whole, or nothing."""
    return [writing.cover.outside.get(of) if cut else None for of, cut in keys]


def _like(nodes: Iterable[fx.Node], takes: Sequence[Band | None]) -> list[torch.Tensor]:
    return [_narrow(of.meta[VALUE], band) for of, band in zip(nodes, takes, strict=True)]


def _in_parts(make: Callable[..., tuple[Banded, list[Key]] | None], *what: Any, keys: Sequence[Key],
              ) -> Callable[[int], Banded | None]:
    """Return what makes a computation of the same arguments, `keys`, in another number of parts."""
    def coarser(parts: int) -> Banded | None:
        found = make(*what, parts, keys)
        return None if found is None else found[0]

    return coarser


def forward_of(stretch: Stretch, results: Sequence[fx.Node], name: str, parts: int,
               keys: Sequence[Key] | None = None) -> tuple[Banded, list[Key]] | None:
    """Return the results of a stretch as one computation in tiles, and its arguments, statistics of norms
    among them; None if it cannot run in so many."""
    written = _written(stretch, results, parts)
    if written is None:
        return None
    kept = list(dict.fromkeys(key for w in written for key, _ in w.inputs) if keys is None else keys)
    tiles = [Tile(graph, takes, tuple(w.cover.own.get(r) for r in results), range(len(results)))
             for w, (graph, takes) in zip(written, _forward_tiles(written, kept), strict=True)]
    made = [_part_like(r.meta[VALUE], stretch.dims.get(r)) for r in results]

    coarser = _in_parts(forward_of, stretch, results, name, keys=kept)
    return Banded(name, stretch.about, parts, runs_of(tiles), tuple(made), coarser), kept


def _forward_tiles(written: Sequence[_Writing], keys: Sequence[Key],
                   ) -> Iterator[tuple[fx.Graph, tuple[Band | None, ...]]]:
    """Yield the operations of each tile, with a placeholder for each argument, and the part of each."""
    known: dict[str, fx.Graph] = {}
    for writing in written:
        takes = _taken(writing, keys)
        text = f"{writing.graph}{[b and (b.dim, len(b)) for b in takes]}"
        if text not in known:
            known[text] = _ordered(writing.graph, [writing.inputs.get((key, None)) for key in keys],
                                   _names(keys))
            with _mode(keys):
                _describe(known[text], _like((of for of, _ in keys), takes))
        yield known[text], tuple(takes)


STATISTICS = 4
"""Results of a norm's passes: the sum of values, the sum of squares, mean and variance."""


def statistics_of(stretch: Stretch, norms: Mapping[fx.Node, int], name: str, parts: int,
                  keys: Sequence[Key] | None = None) -> tuple[Banded, list[Key]] | None:
    """Return the statistics of norms as one computation in tiles with `STATISTICS` results for each norm, and
    its arguments; None if it cannot run in so many. `norms`: as `Stretch.norms` finds them."""
    own: dict[Key, int] = {}
    passes = []
    for k, (norm, dim) in enumerate(norms.items()):
        written = _written(stretch, (), parts, norms={norm: dim}, unknown=norm)
        if written is None:
            return None
        passes.append(written)
        own |= {(port.of, False): STATISTICS * k + 2 + i
                for i, port in enumerate(stretch.statistics(norm))}
    kept = list(dict.fromkeys(key for written in passes for w in written for key, _ in w.inputs
                              if key not in own) if keys is None else keys)
    runs: list[TileRun] = []
    made: list[Part] = []
    for norm, written in zip(norms, passes, strict=True):
        like = stretch.statistics(norm)[0].of.meta[VALUE]
        sums = [Part(tuple(like.shape), torch.float64, like.device, None)] * 2
        reads = [key for key in own if own[key] < len(made)]
        known = [*kept, *reads]
        tiles = [Tile(graph, takes[:len(kept)], (None, None), range(len(made), len(made) + 2))
                 for graph, takes in _forward_tiles(written, known)]
        runs += runs_of(tiles, [own[key] for key in reads])
        runs.append(_finish(norm, kept, len(made)))
        made += [*sums, *[Part(tuple(like.shape), like.dtype, like.device, None)] * 2]

    coarser = _in_parts(statistics_of, stretch, norms, name, keys=kept)
    return Banded(name, stretch.about, parts, tuple(runs), tuple(made), coarser), kept


def _finish(node: fx.Node, keys: Sequence[Key], first: int) -> TileRun:
    """Return what makes mean and variance of sums. `first`: the number of the first of these results."""
    norm = norm_of(node)
    assert norm is not None
    with _mode(keys):
        like = [torch.empty(norm.shape, dtype=torch.float64, device=norm.x.meta[VALUE].device)
                for _ in range(2)]
    derived = operations_of(finished(norm), like)
    graph = _ordered(derived, [*[None] * len(keys), *(n for n in derived.nodes if n.op == "placeholder")],
                     [*_names(keys), "sums", "squares"])
    with _mode(keys):
        _describe(graph, [*(of.meta[VALUE] for of, _ in keys), *like])
    return TileRun(graph, ((None,) * len(keys),), ((None, None),), (first + 2, first + 3), (first, first + 1))


def backward_of(stretch: Stretch, entering: Mapping[fx.Node, fx.Node],
                groups: Sequence[tuple[Sequence[Port], fx.Node]], name: str, parts: int,
                keys: Sequence[Key] | None = None) -> tuple[Banded, list[Key]] | None:
    """Return gradients of a stretch as one computation in tiles, and its arguments, statistics of norms among
    them, which the gradients that enter by results (`entering`) follow; None if it cannot run in so many.
    `groups`: of ports, each with its gradient; gradients of statistics are further results."""
    results = [*entering]
    norms = stretch.norms(results)
    every = [*(ports for ports, _ in groups), *([p] for norm in norms for p in stretch.statistics(norm))]
    group_of = {port: g for g, ports in enumerate(every) for port in ports}
    passes: list[tuple[list[_Writing], list[int]]] = []
    order = list(norms)
    for k in range(len(order), -1, -1):
        wanted = stretch.statistics(order[k - 1]) if k else [port for ports, _ in groups for port in ports]
        later = order[k:]
        written = _written(stretch, results, parts, group_of={port: group_of[port] for port in wanted},
                           norms={n: norms[n] for n in later})
        if written is None:
            return None
        passes.append((written, [group_of[port] for n in later for port in stretch.statistics(n)]))
    kept = list(dict.fromkeys(key for written, _ in passes for w in written for key, _ in w.inputs)
                if keys is None else keys)
    runs: list[TileRun] = []
    gives: dict[int, list[Band | None]] = {}
    known: dict[str, fx.Graph] = {}
    for written, reads in passes:
        reached = sorted({g for w in written for _, g in w.inputs if g is not None})
        tiles: list[Tile] = []
        for w in written:
            if len({g for _, g in w.inputs} - {None}) < len(reached):
                return None
            takes = [*_taken(w, kept), *(w.cover.own.get(r) for r in results)]
            text = f"{w.graph}{[b and (b.dim, len(b)) for b in takes]}{reads}"
            if text not in known:
                with _mode(kept):
                    like = [*_like((*(of for of, _ in kept), *entering.values()), takes), *(
                        torch.empty(v.shape, dtype=v.dtype, device=v.device)
                        for g in reads for v in [every[g][0].of.meta[VALUE]])]
                known[text] = _gradients(w, kept, reached, like)
            parts_given = tuple(w.cover.outside.get(every[g][0].of) for g in reached)
            for g, band in zip(reached, parts_given, strict=True):
                gives.setdefault(g, []).append(band)
            tiles.append(Tile(known[text], tuple(takes), parts_given, reached))
        runs += runs_of(tiles, reads)
    if len(gives) < len(every) or any(len({b and b.dim for b in bands}) > 1 for bands in gives.values()):
        return None
    made = []
    for g, ports in enumerate(every):
        value, bands = ports[0].of.meta[VALUE], [b for b in gives[g] if b is not None]
        made.append(_part_like(groups[g][1].meta[VALUE] if g < len(groups) else value,
                               bands[0].dim if bands else None,
                               bool(bands) and not _cover_once(bands, value.shape[bands[0].dim])))

    coarser = _in_parts(backward_of, stretch, entering, groups, name, keys=kept)
    return Banded(name, stretch.about, parts, tuple(runs), tuple(made), coarser), kept


def _gradients(writing: _Writing, keys: Sequence[Key], groups: Sequence[int], like: Sequence[torch.Tensor],
               ) -> fx.Graph:
    """Return the gradients of one tile, derived from its operations. `like`: its arguments, the gradients of
    its results last."""
    at = {key: k for k, key in enumerate(keys)}

    def derive(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, leaves = {}, {}
        for (key, group), node in writing.inputs.items():
            values[node] = given[at[key]].detach()
            if group is not None:
                leaves[group] = values[node].requires_grad_()
        results = _run(writing.graph, values)
        found = _derived(results, [leaves[g] for g in groups], given[len(keys):])
        return tuple(torch.zeros_like(leaves[g]) if made is None else made
                     for g, made in zip(groups, found, strict=True))

    derived = operations_of(derive, like)
    graph = _ordered(derived, [n for n in derived.nodes if n.op == "placeholder"],
                     [*_names(keys), *["grad"] * (len(like) - len(keys))])
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


def _names(keys: Sequence[Key]) -> list[str]:
    return ["x" if cut else "w" for _, cut in keys]


def _ordered(graph: fx.Graph, inputs: Sequence[fx.Node | None], names: Sequence[str]) -> fx.Graph:
    """Return a copy of a graph whose placeholders are in the order of arguments."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, name in zip(inputs, names, strict=True):
        new = made.placeholder(name)
        if node is not None:
            copies[node] = new
    for node in graph.nodes:
        if node.op == "call_function":
            name = operator_name(node.target, "item").lstrip("_")
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            # Kernels may lay out what is viewed otherwise than the trace says: reshape then copies.
            target = aten.reshape.default if node.target in RESHAPES else node.target
            copies[node] = made.create_node("call_function", target, args, kwargs, name)
        elif node.op == "output":
            made.output(tuple(copies[n] for n in node.args[0]))
    return made


def _describe(graph: fx.Graph, like: Sequence[torch.Tensor]) -> None:
    for node, value in zip([n for n in graph.nodes if n.op == "placeholder"], like, strict=True):
        node.meta[VALUE] = value
    propagate(graph)


def _mode(keys: Sequence[Key]) -> Any:
    return keys[0][0].meta[VALUE].fake_mode
