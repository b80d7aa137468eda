"""Slices of equal blocks, written once.

Blocks of one class have the same operations on values of the same forms, wired alike. Where a stretch of one
runs the same computations in the same way as a stretch of another, both are one function, called with other
keys.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from rkmate.codegen.liveness import Computed, Flow
from rkmate.codegen.slices import Draws, Slice
from rkmate.graph.blocks.expressions import operators_of
from rkmate.graph.blocks.partition import Block, Partition
from rkmate.graph.capture.captured import Source
from rkmate.ir.cd import HOISTED

_PLAIN = frozenset(("aten", "prims"))
"""Namespaces of operators whose call determines everything that they do. The package's own operators, except
products, may name a part of a model."""


class Way(NamedTuple):
    """How a computation runs at one place of a schedule, in addition to what its block determines."""

    again: float | None
    """Seconds of a computation that ran before; None for a first run."""
    draws: Draws
    state: int | None
    """Number of the slice's generator state that a repeated draw stores or restores."""
    adds: bool


@dataclass(frozen=True)
class Stretched:
    """A stretch of a block's steps, in terms that are the same for all equal blocks."""

    key: tuple[Any, ...]
    """Key of everything that determines the text."""
    block: Block
    sources: tuple[Source, ...]
    """The caller's tensors that its computations read, in order; some occur several times."""


@dataclass(frozen=True)
class Written:
    """A slice, and which of its block's values it speaks of."""

    slice: Slice
    give: tuple[int, ...]
    """Places among the block's D nodes."""
    sources: tuple[int, ...]
    """Places among `Stretched.sources`."""


@dataclass
class Alike:
    """The slices of a program that were written so far, by what decides on their text."""

    partition: Partition
    labels: Sequence[str] | None
    """Names of the blocks' classes; without them no blocks are known to be equal."""
    _written: dict[tuple[Any, ...], Written] = field(default_factory=dict)
    _places: dict[int, tuple[Mapping[int, int], Mapping[int, int]] | None] = field(default_factory=dict)

    def stretched(self, block: int, found: Flow, ways: Sequence[Way]) -> Stretched | None:
        """Return a stretch of a block; None if the block's class does not determine its text. `ways`: of its
        computations."""
        places = self._of_block(block)
        if places is None or self.labels is None:
            return None
        ds, cs = places
        program = self.partition.program
        sources = tuple([s for do in found.body if isinstance(do, Computed)
                         for n in program.operation[do.step.c].all_input_nodes
                         if isinstance(s := program.storage[n], Source)])
        size = program.cd.d

        def local(js: Collection[int]) -> tuple[int, ...]:
            return tuple([ds[j] for j in js])

        body = tuple([
            (cs[do.step.c], *do.step[1:], do.waits, local(do.keeps),
             None if do.donor is None else ds[do.donor])
            if isinstance(do, Computed) else
            (local(do.d), sum(size[j].size for j in do.d if j != do.donor)) for do in found.body])
        key = (self.labels[block], local(found.take), local(found.read), body, frozenset(local(found.give)),
               tuple(ways), tuple(map(source_name, sources)))
        return Stretched(key, self.partition.blocks[block], sources)

    def get(self, stretch: Stretched) -> Written | None:
        """Return what was written for an equal stretch."""
        return self._written.get(stretch.key)

    def keep(self, stretch: Stretched, made: Slice, give: Sequence[int], sources: Sequence[Source]) -> None:
        """Keep what was written: the slice, the D nodes that it gives, and the sources of its values."""
        place = {j: k for k, j in enumerate(stretch.block.d)}
        first = {s: k for k, s in reversed(list(enumerate(stretch.sources)))}
        self._written[stretch.key] = Written(made, tuple(place[j] for j in give),
                                             tuple(first[s] for s in sources))

    def _of_block(self, b: int) -> tuple[Mapping[int, int], Mapping[int, int]] | None:
        """Return the places of D nodes and of C nodes in their block; None for a block whose class does not
        determine what its operations do."""
        if b not in self._places:
            program, whole = self.partition.program, b != HOISTED and self.partition.blocks[b]
            self._places[b] = None if not whole or not all(
                _says_all(program.operation[i]) for i in whole.c) else (
                {j: k for k, j in enumerate(whole.d)}, {i: k for k, i in enumerate(whole.c)})
        return self._places[b]


def _says_all(node: fx.Node) -> bool:
    """Return whether the class of a block determines what an operation in it does, by any kernel."""
    spaces = {o.namespace for o in operators_of(node)}
    return bool(spaces) and spaces <= _PLAIN


@functools.lru_cache(maxsize=1 << 12)
def source_name(source: Source) -> str:
    """Return the name of a value from outside: ``blocks_weight`` for ``blocks.0.weight``; inputs are
    numbered."""
    if source.kind == "input":
        return "input"
    parts = [p for p in str(source.key).split(".") if not p.isdigit()]
    parts = [*(["grad"] if source.kind == "grad" else []), *parts[-2:]]
    base = re.sub(r"\W", "_", "_".join(parts), flags=re.ASCII) or "p"
    if base == "input":
        return "input_"
    return f"p{base}" if base[0].isdigit() else base
