"""A stretch of operations as one computation that runs tile by tile: batches by images, images by bands with
what their windows see of the neighbours, sequences by blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import owner_of
from rkmate.graph.passes.tiles.pieces import Band
from rkmate.graph.passes.tiles.source import (
    Result,
    add_product,
    new_tensor,
    peak_bytes,
    products_of,
    statement,
    steps_of,
)
from rkmate.graph.passes.tiles.tiled import InTiles
from rkmate.ir.calls import Writer
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import contiguous_strides

aten = torch.ops.aten


@dataclass(frozen=True)
class Part(Result):
    """A result, as tiles make it."""

    dim: int | None
    """The dimension in which each tile fills its part; None: the tiles' results are summed up."""
    overlaps: bool = False
    """Whether the tiles' parts overlap, and are added up there."""
    strides: tuple[int, ...] | None = None
    """Strides of the value that the result replaces; None for a contiguous result."""

    @property
    def is_sum(self) -> bool:
        """Whether the tiles' results are summed up."""
        return self.dim is None


@dataclass(frozen=True)
class TileRun:
    """Consecutive tiles with the same operations."""

    graph: fx.Graph
    """The first tile's operations: a placeholder for each argument, and the results."""
    takes: tuple[tuple[Band | None, ...], ...]
    """For each tile, the part of each argument; None: the whole."""
    gives: tuple[tuple[Band | None, ...], ...]
    """For each tile, its part of each of the results that it makes; None: a summand."""
    makes: tuple[int, ...]
    """The numbers of these results."""
    reads: tuple[int, ...] = ()
    """The numbers of results of earlier runs that each tile reads whole. Their placeholders follow those of
    the arguments."""


@dataclass(frozen=True, eq=False)
class Banded(InTiles):
    """Operations that run tile by tile, as the target of one node with several results.

    Two of equal text are equal. Calling one runs the source that a generated step shows.
    """

    name: str
    """Name of the generated function, without its number."""
    about: str
    """Description of a tile, for the docstring of the generated function."""
    parts: int
    runs: tuple[TileRun, ...]
    gives: tuple[Part, ...]
    coarser: Callable[[int], Banded | None]
    """Returns the computation in another number of parts; None where it cannot run so."""

    prefix = "tiled"

    def function(self, name: str, write: Writer = Writer()) -> str:
        """Return the generated function under another name. `write`: what its operations are written with."""
        return _function(self, name, write)

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return tensors like the results."""
        return tuple(torch.empty_strided(g.shape, g.strides or contiguous_strides(g.shape), dtype=g.dtype,
                                         device=g.device) for g in self.gives)

    def graphs(self) -> Iterator[tuple[fx.Graph, int]]:
        """Yield the operations of each kind of tile, and how many such tiles there are."""
        for run in self.runs:
            yield run.graph, len(run.takes)

    def fewer(self, factor: int) -> Banded | None:
        """Return the computation in fewer parts by a factor; None if it runs in one part, or in no fewer."""
        for parts in range(max(1, self.parts // factor), 0, -1):
            if self.parts > 1 and (made := self.coarser(parts)) is not None:
                return made
        return None

    def tile_bytes(self, inside: Callable[[fx.Node], int]) -> int:
        """Return the most bytes in addition to the results: of one tile, and of sums in another type than
        their result's. `inside`: the temporaries of an operation of a tile."""
        most = max(peak_bytes(run.graph, [self.gives[k] for k in run.makes], inside, _held(self, run))
                   for run in self.runs)
        return most + self.sum_bytes(apart=True) + self._carried_bytes

    @functools.cached_property
    def over(self) -> int | None:                               # type: ignore[override]
        """The position of the argument over which tiles can write the first result: each tile reads its own
        part of it, and later tiles read later parts. None if there is none."""
        made, first = [run for run in self.runs if 0 in run.makes], self.gives[0]
        if first.dim is None or self.runs[-len(made):] != tuple(made) or any(
                run.makes.count(0) > 1 or owner_of(_first(run)).op == "placeholder" for run in made):
            return None
        return next((k for k in reversed(range(len(self.runs[0].takes[0]))) if _covers(made, k, first)), None)

    @property
    def _carried_bytes(self) -> int:
        """The bytes of what the first result keeps from one tile for the next."""
        if self.over is None:
            return 0
        first, dim = self.gives[0], self.gives[0].dim
        assert dim is not None
        most = max(_overlap(run, self.over)[1] for run in self.runs if 0 in run.makes)
        return math.prod(first.shape) // first.shape[dim] * most * first.dtype.itemsize

    def __repr__(self) -> str:
        return f"{self.name}({self.about}, {self.parts} tiles)"


@dataclass(frozen=True)
class Tile:
    """A single tile."""

    graph: fx.Graph
    takes: Sequence[Band | None]
    """The part of each argument."""
    gives: Sequence[Band | None]
    """The part of each result that the graph makes; None: a summand."""
    makes: Sequence[int]
    """The numbers of these results."""


def runs_of(tiles: Sequence[Tile], reads: Sequence[int] = ()) -> tuple[TileRun, ...]:
    """Return tiles with neighbours that do the same at equal distances as one run. `reads`: numbers of
    results."""
    runs: list[list[int]] = []
    texts = [_text(tile.graph) for tile in tiles]
    for k, _ in enumerate(tiles):
        run = runs[-1] if runs else []
        if run and texts[k] == texts[k - 1] and _follow([tiles[n] for n in [*run, k]]):
            run.append(k)
        else:
            runs.append([k])
    made = []
    for run in runs:
        first = tiles[run[0]]
        graph, order = _in_terms(first)
        made.append(TileRun(graph, tuple(tuple(tiles[k].takes) for k in run),
                            tuple(tuple(tiles[k].gives[n] for n in order) for k in run),
                            tuple(first.makes[n] for n in order), tuple(reads)))
    return tuple(made)


def _in_terms(tile: Tile) -> tuple[fx.Graph, list[int]]:
    """Return a tile's operations with the terms of each summand as results of their own: each is added where
    it belongs, and there is no sum of them before. Also returns the number of the result of each term."""
    graph, order = fx.Graph(), list[int]()
    terms: list[fx.Node] = []
    copies: dict[fx.Node, fx.Node] = {}
    output: Any = tile.graph.output_node().args[0]
    for k, node in enumerate(output):
        found = [node] if tile.gives[k] is not None or output.count(node) > 1 else _terms(node)
        order += [k] * len(found)
        terms += found
    for node in tile.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[n] for n in terms))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return graph, order


def _terms(node: fx.Node) -> list[fx.Node]:
    """Return what is added up to a value that nothing else reads, without the views of products."""
    if len(node.users) == 1:
        if node.target is aten.add.Tensor and not node.kwargs and all(
                isinstance(n, fx.Node) and n.meta[VALUE].shape == node.meta[VALUE].shape for n in node.args) \
                and node.args[0] is not node.args[1]:
            return [t for n in node.args for t in _terms(n)]                # type: ignore[arg-type]
        base: Any = node.args[0] if node.args else None
        if node.target is aten.reshape.default and base.target is aten.mm.default:
            return _terms(base)
    return [node]


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def _follow(tiles: Sequence[Tile]) -> bool:
    """Return whether the parts of the last tile follow those before at the same distance."""
    *_, before, last = tiles
    for a, b in zip((*before.takes, *before.gives), (*last.takes, *last.gives), strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and len(a) != len(b)):
            return False
    if len(tiles) < 3:
        return True
    return all(a is None or b is None or c is None or b.start - a.start == c.start - b.start
               for a, b, c in zip(*((*t.takes, *t.gives) for t in tiles[-3:]), strict=True))


# -- The first result in the memory of an argument -------------------------------------------------


def _first(run: TileRun) -> fx.Node:
    """Return the tile's part of the first result."""
    output: Any = run.graph.output_node().args[0]
    node: fx.Node = output[run.makes.index(0)]
    return node


def _held(banded: Banded, run: TileRun) -> list[fx.Node]:
    """Return the results that are put where they belong after a tile's last operation: before, the tile may
    still read what they overwrite."""
    return [_first(run)] if banded.over is not None and 0 in run.makes else []


def _pairs(run: TileRun, argument: int) -> list[tuple[Band | None, Band | None]]:
    """Return each tile's part of an argument and of the first result."""
    k = run.makes.index(0)
    return [(takes[argument], gives[k]) for takes, gives in zip(run.takes, run.gives, strict=True)]


def _overlap(run: TileRun, argument: int) -> tuple[int, int]:
    """Return how much of the first result a tile makes before and after its part of an argument."""
    mine, made = _pairs(run, argument)[0]
    assert mine is not None and made is not None
    return mine.start - made.start, made.stop - mine.stop


def _covers(runs: Sequence[TileRun], argument: int, first: Part) -> bool:
    """Return whether tiles read an argument like the first result part by part, and make of each part, and
    of its neighbours no larger than a tile's."""
    at = carried = 0
    for run in runs:
        value, pairs = _inputs(run)[argument].meta[VALUE], _pairs(run, argument)
        for mine, made in pairs:
            if mine is None or made is None or not mine.dim == made.dim == first.dim or mine.start != at \
                    or made.start > at or made.stop < mine.stop or carried > len(mine):
                return False
            at, carried = mine.stop, made.stop - mine.stop
        like = list(first.shape)
        like[first.dim or 0] = value.shape[first.dim or 0]
        if list(value.shape) != like or value.dtype != first.dtype or len(
                {(a.start - b.start, b.stop - a.stop) for a, b in pairs if a and b}) > 1:
            return False
    return not carried and at == first.shape[first.dim or 0]


def _put_first(banded: Banded, run: TileRun) -> list[str]:
    """Return the lines that put a tile's part of the first result over its part of an argument, with the
    part before it, which is written, and the part after it, which the next tile still has to read."""
    first, name, dim = banded.gives[0], _first(run).name, banded.gives[0].dim
    assert banded.over is not None and dim is not None
    own = [mine for mine, _ in _pairs(run, banded.over) if mine is not None]
    before, after = _overlap(run, banded.over)
    part = f"{name}.narrow({dim}, {before}, {len(own[0])})" if before or after else name
    lines = [f"{_part('result_0', own)}.copy_({part})"]
    if before:
        earlier = [Band(dim, band.start - before, band.start) for band in own]
        lines.insert(0, f"{_part('result_0', earlier)}.add_({name}.narrow({dim}, 0, {before}))")
    if first.overlaps:
        lines.append(f"{_part('result_0', own)}.narrow({dim}, 0, carried.shape[{dim}]).add_(carried)")
        lines.append(f"carried = {name}.narrow({dim}, {before + len(own[0])}, {after}).clone()")
    return [*lines, f"del {name}"]


# -- Source ----------------------------------------------------------------------------------------


def _function(banded: Banded, name: str, write: Writer) -> str:
    inputs = _inputs(banded.runs[0])
    cut = [any(tile[k] is not None for run in banded.runs for tile in run.takes) for k in range(len(inputs))]
    given = [f"all_{n.name}" if c else n.name for n, c in zip(inputs, cut, strict=True)]
    over = [] if banded.over is None else ["over=None"]
    lines = [f"def {name}({', '.join([*given, *over])}):", f'    """{banded.about}, {banded.parts} tiles."""']
    for k, part in enumerate(banded.gives):
        first = bool(over) and k == 0
        kind = "zeros" if (part.is_sum or part.overlaps) and not first else "empty"
        made = new_tensor(kind, list(part.shape), part.sums_in, part.device, write, part.strides)
        lines.append(f"    result_{k} = {made}{' if over is None else over' if first else ''}")
        if first and part.overlaps:
            lines.append(f"    carried = result_0.narrow({part.dim}, 0, 0)")
    for run in banded.runs:
        body = _body(banded, run, given, write)
        if len(run.takes) > 1:
            lines.append(f"    for at in range({len(run.takes)}):")
            body = [f"    {line}" for line in body]
        lines += [f"    {line}" for line in body]
    ends = [f"result_{k}" if part.sums_in == part.dtype else f"result_{k}.to({part.dtype})"
            for k, part in enumerate(banded.gives)]
    lines.append(f"    return ({', '.join(ends)},)")
    return "\n".join(lines) + "\n"


def _inputs(run: TileRun) -> list[fx.Node]:
    """Return the placeholders of the arguments."""
    return [n for n in run.graph.nodes if n.op == "placeholder"][:len(run.takes[0])]


def _body(banded: Banded, run: TileRun, given: Sequence[str], write: Writer) -> list[str]:
    inputs = _inputs(run)
    output: Any = run.graph.output_node().args[0]
    body = [f"{node.name} = {_part(given[k], [tile[k] for tile in run.takes])}"
            for k, node in enumerate(inputs) if given[k] != node.name and node.users]
    known = [n for n in run.graph.nodes if n.op == "placeholder"][len(inputs):]
    body += [f"{node.name} = result_{k}" for node, k in zip(known, run.reads, strict=True) if node.users]
    made = [banded.gives[k] for k in run.makes]
    parts = [_sum(k, part, n) if part.is_sum else _part(f"result_{k}", [tile[i] for tile in run.gives])
             for i, (k, part, n) in enumerate(zip(run.makes, made, output, strict=True))]
    put = ["add_" if part.is_sum or part.overlaps else "copy_" for part in made]
    at_once = [k for k, n in enumerate(output) if n.op == "placeholder"]
    body += [f"{parts[k]}.{put[k]}({output[k].name})" for k in at_once]
    fused = {n: parts[k] for k, n in products_of(run.graph, made).items()}
    held = _held(banded, run)
    for step in steps_of(run.graph, held):
        if step.node in fused:
            body.append(add_product(fused[step.node], step.node, write))
        else:
            body.append(statement(step, write))
            body += [f"{parts[k]}.{put[k]}({n.name})" for k, n in enumerate(output)
                     if n is step.node and not (held and run.makes[k] == 0)]
        ends = [n.name for n in step.ends if n not in fused and n not in held]
        body += [f"del {', '.join(ends)}"] if ends else []
    return [*body, *(_put_first(banded, run) if held else [])]


def _sum(k: int, part: Part, node: fx.Node) -> str:
    """Return a sum in the shape of what is added to it."""
    shape = list(node.meta[VALUE].shape)
    return f"result_{k}" if shape == list(part.shape) else f"result_{k}.view({shape})"


def _part(name: str, bands: Sequence[Band | None]) -> str:
    """Return the part of a value in each tile of a run, as an expression in `at`."""
    first = bands[0]
    if first is None:
        return name
    step = bands[1].start - first.start if len(bands) > 1 and bands[1] is not None else 0
    moved = "at" if step == 1 else f"{step} * at"
    start = str(first.start) if not step else f"{first.start} + {moved}" if first.start else moved
    return f"{name}.narrow({first.dim}, {start}, {len(first)})"
