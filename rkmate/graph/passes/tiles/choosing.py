"""Which stretches of operations run in tiles, along which dimension, and in how many parts.

A stretch ends where elements are mixed, where something is drawn at random, and where a value is needed
whole: the keys and values of an attention. Of the dimensions that can be cut, the one counts with which the
largest stretch needs least.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import PRODUCTS, is_random, is_view
from rkmate.graph.passes.joint import Joint, bytes_of, readers_of, shape_of, value_of
from rkmate.graph.passes.tiles.cuts import EVEN, piece, summand, summed
from rkmate.graph.passes.tiles.heads import heads_of
from rkmate.graph.passes.tiles.pieces import Band, Need, Piece
from rkmate.graph.passes.tiles.rewrite import late_nodes
from rkmate.graph.passes.tiles.stretch import (
    length_of,
    spread,
    sum_of,
)
from rkmate.graph.passes.tiles.windows import windows_bytes
from rkmate.torch_seam.nodes import VALUE, is_backward, wish_of

aten = torch.ops.aten

MOST_PARTS = 32
"""Largest number of parts of a stretch: with more, calls take longer than what they compute."""
MOST_WORK = 2.0
"""The work of all tiles together at most, as a multiple of the whole's: what windows see of neighbours is
computed in each tile."""
MOST_NORMS = 4
"""Norms with passes of their own in a stretch, at most: each pass computes the stretch once more."""
CUTS = 24
"""Places in a stretch at which it may be cut in two, at most."""
CLEARLY = 0.7
"""Another dimension is cut where the largest need is less than this part of what an earlier one leads to."""
EXACT = 1.01
"""Tiles that compute so little more than the whole do not overlap: fewer of them would need more."""
SMALL = 0.5
"""A stretch that needs less than this part of the largest one runs as it is."""
A_PART = 0.02
"""Parts of a stretch with norms cost as much as this part of the work of the whole stretch: so much is
computed again rather than to have one more."""
HEAVY = (aten.convolution.default, *PRODUCTS, aten.bmm.default)


@dataclass(frozen=True)
class Axis:
    """A dimension that tiles cut."""

    name: str
    """A tile, in words."""
    starts: dict[int, int]
    """Number of dimensions of a value -> the one that is cut where a stretch begins."""
    columns: bool = False
    """Whether a stretch begins with products, columns of whose weights are cut."""


IMAGES = Axis("images of a batch", dict.fromkeys(range(1, 7), 0))
AXES = (IMAGES, Axis("blocks of a sequence", {2: 0, 3: 1}), Axis("bands of an image", {4: 2, 5: 2}),
        Axis("columns of weights", {}, columns=True))


# -- What can be cut along an axis -----------------------------------------------------------------


@dataclass(eq=False)
class Labels:
    """The forward operations that can be cut along an axis."""

    axis: Axis
    images: int
    """The length of the first dimension of the model's inputs; 1 where they differ."""
    passes: bool = False
    """Whether norms may have passes of their own."""
    dims: dict[fx.Node, int] = field(default_factory=dict)
    sums: dict[fx.Node, int] = field(default_factory=dict)
    inner: set[fx.Node] = field(default_factory=set)
    """Other results of operations, which the backward alone reads."""
    level: dict[fx.Node, int] = field(default_factory=dict)
    """Operations of a level read whole values of lower levels only."""
    needs: dict[fx.Node, tuple[Need, ...]] = field(default_factory=dict)
    mixing: set[fx.Node] = field(default_factory=set)
    """Norms that have a pass of their own."""

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.dims or node in self.sums

    def take(self, node: fx.Node, moving: Collection[fx.Node]) -> None:
        """Find how an operation is cut, if it is. `moving`: values that depend on the model's inputs."""
        base: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and base in self and (base in self.sums or (
                node.args[1] and base.target not in EVEN)):
            if node.args[1]:
                self.inner.add(node)
            else:
                self.sums[node], self.needs[node] = self.sums[base], ((base, None),)
            self.level[node] = self.level[base]
            return
        best = min(self._ways(node, moving), default=None, key=lambda way: way[:3]) \
            if node in moving and not is_random(node) and wish_of(node) is None and _is_one(node) \
            and (node.target is not operator.getitem or base in self) else None
        if best is None:
            self.level[node] = max((self.level.get(n, 0) + (n in self) for n in node.all_input_nodes),
                                   default=0)
            return
        self.level[node], _, dim, summed, made = best
        self.needs[node] = made.needs
        (self.sums if summed else self.dims)[node] = dim
        self.mixing |= {node} if made.mixes else set()

    def _ways(self, node: fx.Node, moving: Collection[fx.Node],
              ) -> Iterator[tuple[int, int, int, bool, Piece]]:
        """Yield level, operands that continue a stretch (negative), dimension, whether it sums, and the
        operation."""
        shape = shape_of(node)
        for dim, size in enumerate(shape):
            made = piece(node, Band(dim, 0, size)) if size > 1 else None
            if made is not None and (self.passes or not made.mixes):
                level, hits, cuts = self._joins(made.needs, moving)
                if hits or (cuts and self._starts(shape, dim)) or (
                        self.axis.columns and node.target in PRODUCTS and dim == 1):
                    yield level, -hits, dim, False, made
        first = summed(node)
        if isinstance(first, fx.Node) and first in self.dims:
            dim = self.dims[first]
            made = summand(node, Band(dim, 0, shape_of(first)[dim]))
            if made is not None:
                level, hits, _ = self._joins(made.needs, moving)
                yield level, -hits, dim, True, made

    def _starts(self, shape: Sequence[int], dim: int) -> bool:
        """Return whether a stretch may begin with a value that is cut along this dimension."""
        if self.axis is IMAGES and (self.images < 2 or shape[dim] % self.images):
            return False
        return self.axis.starts.get(len(shape)) == dim

    def _joins(self, needs: Sequence[Need], moving: Collection[fx.Node]) -> tuple[int, int, int]:
        level = hits = cuts = 0
        for operand, band in needs:
            if band is not None and self.dims.get(operand) == band.dim:
                level, hits = max(level, self.level[operand]), hits + 1
            else:
                level = max(level, self.level.get(operand, 0) + (operand in self))
                cuts += band is not None and operand in moving
        return level, hits, cuts

    def sink(self, handed: Collection[fx.Node]) -> None:
        """Move what only a later stretch reads there: it is computed where it is needed."""
        for node in reversed([n for n in self.level if n in self]):
            users = [u for u in node.users if not is_backward(u) and u not in self.inner]
            if node in handed or not users or node.target is operator.getitem or any(
                    u not in self or not any(n is node and b is not None and b.dim == self.dims.get(node)
                                             for n, b in self.needs[u]) for u in users):
                continue
            self.level[node] = min(self.level[u] for u in users)

    def stretches(self) -> list[list[fx.Node]]:
        """Return the largest stretches, each in order."""
        root: dict[fx.Node, fx.Node] = {}

        def find(node: fx.Node) -> fx.Node:
            while root.setdefault(node, node) is not node:
                node = root[node]
            return node

        for node in self.level:
            if node in self:
                for operand in node.all_input_nodes:
                    if operand in self and self.level[operand] == self.level[node]:
                        root[find(operand)] = find(node)
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.level:
            if node in self:
                found.setdefault(find(node), []).append(node)
        return list(found.values())


def _is_one(node: fx.Node) -> bool:
    """Return whether an operation's result is one tensor, or the others are for its backward alone."""
    value = node.meta.get(VALUE)
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (tuple, list)) and all(
        u.target is operator.getitem and (not u.args[1] or node.target in EVEN or all(map(
            is_backward, u.users))) for u in node.users)


def _labels(joint: Joint, axis: Axis, late: Collection[fx.Node], moving: Collection[fx.Node]) -> Labels:
    lengths = {(shape_of(n) or (1,))[0] for n, s in joint.sources.items() if s.kind == "input"}
    labels = Labels(axis, lengths.pop() if len(lengths) == 1 else 1, "tiled-norms" in joint.choices)
    for node in joint.graph.nodes:
        if node.op == "call_function" and not is_backward(node) and node not in late:
            labels.take(node, moving)
    labels.sink(joint.handed())
    return labels


# -- Which stretches run in tiles ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """A stretch, and in how many tiles it runs."""

    labels: Labels
    nodes: list[fx.Node]
    parts: int
    bytes: float
    """Estimate of what its backward takes at once."""
    whole: float
    """Estimate of what it takes without tiles."""
    again: float = 0.0
    """Estimate of the work of passes for norms, as a part of all work."""


def chosen(joint: Joint) -> list[Plan]:
    """Return the stretches that run in tiles, along the dimension with which the largest one needs least."""
    late = late_nodes(joint)
    moving = {n for n, s in joint.sources.items() if s.kind == "input"}
    moving |= readers_of(moving)
    if "chunked-loss" in joint.choices:                         # heads have tiles of their own
        moving -= heads_of(joint)
    handed = joint.handed()
    best: tuple[float, list[Plan]] | None = None
    for axis in AXES:
        labels = _labels(joint, axis, late, moving)
        walls = [n for n in labels.level if n in moving and n not in labels and n not in labels.inner]
        least = max((_alone(n, moving) for n in walls), default=0.0)
        partings = [_Parting(labels, nodes, handed, moving, least) for nodes in labels.stretches()]
        plans = [plan for parting in partings for plan in parting.best()]
        most = max([least, *(p.bytes for p in plans)])
        if best is None or most < CLEARLY * best[0]:
            best = most, plans
    assert best is not None
    most, plans = best
    return [p for p in plans if p.parts > 1 and p.whole > SMALL * most]


def _alone(node: fx.Node, moving: Collection[fx.Node]) -> float:
    """Return the bytes that the backward of one operation takes at once: its operands and their gradients,
    and the gradient of its result; for a convolution, whose kernels work in a layout of their own, twice. A
    sum needs no operands, and its operands' gradients are the result's. The model's inputs are the caller's,
    except for a copy in a convolution's own layout."""
    if is_view(node) or node.target is operator.getitem:
        return 0.0
    if node.target is aten.add.Tensor:
        return float(bytes_of(node))
    given = _given(node.all_input_nodes, moving)
    found = float(bytes_of(node) + sum((2 if n in moving else 1) * bytes_of(n) for n in node.all_input_nodes
                                       if n not in given))
    if node.target is aten.convolution.default:
        found = 2 * found + sum(map(bytes_of, given))
        found += windows_bytes(node, Band(0, 0, shape_of(node)[0]), cut=False)
    return found


def _given(nodes: Iterable[fx.Node], moving: Collection[fx.Node]) -> set[fx.Node]:
    """Return the model's inputs among operands, which are the caller's."""
    return {n for n in nodes if n in moving and n.op == "placeholder"}


def looked_at(node: fx.Node) -> fx.Node:
    """Return the value that a view is of."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _weight(nodes: Iterable[fx.Node]) -> float:
    """Return the bytes of operations' results and their gradients."""
    return 2.0 * sum(bytes_of(n) for n in nodes if not is_view(n) and n.target is not operator.getitem)


@dataclass(eq=False)
class _Parting:
    """The way to run a stretch in one part or several, each in tiles or not, so that the largest need of any
    is as small as can be, and the parts are few."""

    labels: Labels
    nodes: list[fx.Node]
    handed: Collection[fx.Node]
    moving: set[fx.Node]
    least: float
    """Bytes that something else needs."""

    def best(self) -> list[Plan]:
        """Return the parts."""
        places = self._places()
        known = {(i, j): self._estimate(self.nodes[i:j])
                 for a, i in enumerate(places) for j in places[a + 1:]}
        most = {0: 0.0}
        for j in places[1:]:
            most[j] = min(max(most[i], known[i, j].bytes) for i in places if i < j)
        limit = max(self.least, most[places[-1]])
        best: dict[int, tuple[float, float, int]] = {0: (0, 0.0, 0)}
        for j in places[1:]:
            ways = [(best[i][0] + A_PART + known[i, j].again, known[i, j].bytes, i) for i in places
                    if i < j and i in best and known[i, j].bytes <= limit]
            if ways:
                best[j] = min(ways)
        found: list[Plan] = []
        j = places[-1]
        while j:
            i = best[j][2]
            found.append(known[i, j])
            j = i
        return found[::-1]

    def _places(self) -> list[int]:
        """Return where a stretch may be cut: at its beginning and its end, and where little is read
        across."""
        nodes = self.nodes
        at = {n: k for k, n in enumerate(nodes)}
        last = {n: max((at[u] for u in n.users if u in at), default=-1) for n in nodes}
        crossing = []
        open_: set[fx.Node] = set()
        for k in range(1, len(nodes)):
            open_.add(nodes[k - 1])
            open_ = {n for n in open_ if last[n] >= k}
            if nodes[k].target in HEAVY or nodes[k] in self.labels.mixing:
                crossing.append((len(open_), sum(map(bytes_of, open_)), k))
        return sorted([0, len(nodes), *(k for *_, k in sorted(crossing)[:CUTS])])

    def _estimate(self, nodes: list[fx.Node]) -> Plan:
        labels, inside = self.labels, set(nodes)
        whole = max(_alone(n, self.moving) for n in nodes)
        plain = Plan(labels, nodes, 1, whole, whole)
        norms = [n for n in nodes if n in labels.mixing]
        read = {n for node in nodes for n in node.all_input_nodes if n not in inside}
        cut = {o for node in nodes for o, band in labels.needs[node] if band is not None and o in read}
        ours = cut - _given(cut, self.moving)
        made = [n for n in nodes if n in self.handed or any(
            u not in inside and not is_backward(u) and u not in labels.inner for u in n.users)]
        # Of what is read whole, the sum of the gradients and, unless products are added to it, a tile's own.
        alone = {looked_at(n) for n in read - cut if n in self.moving and any(
            u.target not in PRODUCTS for u in n.users if u in inside)}
        fixed = 2.0 * sum(map(bytes_of, ours)) + sum(map(bytes_of, made)) + sum(
            (2 + (n in alone)) * bytes_of(n) for n in {looked_at(n) for n in read - cut})
        if labels.axis.columns:             # the gradient that theirs is computed from stands, too
            fixed += sum(bytes_of(n) for n in made if n in labels.dims)
        like = {(shape_of(n), value_of(n).dtype) for n in made if n in labels.dims}
        # A gradient that leaves takes the memory of one that enters.
        fixed -= max((bytes_of(n) for n in ours & self.moving if (shape_of(n), value_of(n).dtype) in like),
                     default=0)
        own = _weight(nodes)
        if not made or fixed >= whole or len(nodes) < 2 or any(n not in labels for n in made) \
                or len(norms) > MOST_NORMS:
            return plain
        best = plain
        most = min(MOST_PARTS, *(length_of(n, labels.dims, labels.sums) for n in [*made, *norms]))
        least = min((shape_of(n)[labels.dims[n]] for n in nodes if n in labels.dims), default=most)
        for parts in sorted({most, *(n for n in (least, 16, 8, 4, 2) if 1 < n < most)}, reverse=True):
            work = self._work(nodes, made, norms, parts)
            if work > MOST_WORK:
                continue
            now = fixed + own * work / parts + max(self._inside(n, work / parts) for n in nodes)
            if now < best.bytes:
                best = Plan(labels, nodes, parts, now, whole, len(norms) * work * own / self._all)
            if work < EXACT:
                break
        return best

    def _inside(self, node: fx.Node, share: float) -> float:
        """Return the bytes that a convolution takes inside for a share of its operand: its weight in the
        layout of its kernel, and windows that it lays side by side."""
        if node.target is not aten.convolution.default or node not in self.labels.dims:
            return 0.0
        dim, weight = self.labels.dims[node], node.args[1]
        assert isinstance(weight, fx.Node)
        band = Band(dim, 0, math.ceil(share * shape_of(node.args[0])[dim]))
        return bytes_of(weight) + windows_bytes(node, band, cut=True)

    @functools.cached_property
    def _all(self) -> float:
        return _weight(self.nodes)

    def _work(self, nodes: list[fx.Node], made: Sequence[fx.Node], norms: Sequence[fx.Node],
              parts: int) -> float:
        """Return the work of all tiles, as a multiple of the whole's; infinite where the stretch cannot be
        cut so."""
        dims, sums = self.labels.dims, self.labels.sums

        def part(node: fx.Node, dim: int) -> Band:
            size, k = length_of(node, dims, sums), parts // 2
            return Band(dim, size * k // parts, size * (k + 1) // parts)

        whole = max(1, sum(bytes_of(n) for n in nodes if n in dims))
        added = [sum_of(n) for n in made if n in sums]
        found = spread(nodes, {n: part(n, dims[n]) for n in made if n in dims},
                       {n: part(n, sums[n]) for n in added}, {n: part(n, dims[n]) for n in norms}) \
            if parts > 1 else None
        if found is None:
            return math.inf
        some = sum(bytes_of(n) * len(b) / shape_of(n)[b.dim] for n, b in found.bands.items() if n in dims)
        return parts * some / whole
