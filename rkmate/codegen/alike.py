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
from rkmate.graph.blocks.expressions import operator_namespaces
from rkmate.graph.blocks.partition import Block, Partition
from rkmate.graph.capture.capture import Source
from rkmate.ir.cd import HOISTED

_PLAIN = frozenset(("aten", "prims"))
"""Namespaces of operators whose call says all of what they do. This package's own may name a part of a
model."""


class Way(NamedTuple):
    """How a computation runs at one place of a schedule, beside what its block says."""

    again: float | None
    """Of a computation that ran before: its seconds."""
    draws: Draws
    state: int | None
    """Which of the slice's generator states a repeated draw stores or restores."""
    adds: bool


@dataclass(frozen=True)
class Stretched:
    """A stretch of a block's steps, in terms that are the same for all equal blocks."""

    key: tuple[Any, ...]
    """What decides on its text."""
    block: Block
    sources: tuple[Source, ...]
    """What of the caller's its computations read, in order; some several times."""


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
        """A stretch of a block; None where its text is not decided by its block's class. `ways`: of its
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
            (cs[do.step.c], do.step.kernel, local(do.keeps), None if do.donor is None else ds[do.donor])
            if isinstance(do, Computed) else
            (local(do.d), sum(size[j].size for j in do.d if j != do.donor)) for do in found.body])
        key = (self.labels[block], local(found.take), local(found.read), body, frozenset(local(found.give)),
               tuple(ways), tuple(map(source_name, sources)))
        return Stretched(key, self.partition.blocks[block], sources)

    def get(self, stretch: Stretched) -> Written | None:
        """What was written of an equal one."""
        return self._written.get(stretch.key)

    def keep(self, stretch: Stretched, made: Slice, give: Sequence[int], sources: Sequence[Source]) -> None:
        """What was written now: the slice, the D nodes that it gives, and the sources of its values."""
        place = {j: k for k, j in enumerate(stretch.block.d)}
        first = {s: k for k, s in reversed(list(enumerate(stretch.sources)))}
        self._written[stretch.key] = Written(made, tuple(place[j] for j in give),
                                             tuple(first[s] for s in sources))

    def _of_block(self, b: int) -> tuple[Mapping[int, int], Mapping[int, int]] | None:
        """The places of D nodes and of C nodes in their block; None of a block whose class does not say all
        of what its operations do."""
        if b not in self._places:
            program, whole = self.partition.program, b != HOISTED and self.partition.blocks[b]
            self._places[b] = None if not whole or not all(
                _says_all(program.operation[i]) for i in whole.c) else (
                {j: k for k, j in enumerate(whole.d)}, {i: k for k, i in enumerate(whole.c)})
        return self._places[b]


def _says_all(node: fx.Node) -> bool:
    """Whether the class of a block decides what an operation of it does, by whichever kernel."""
    spaces = operator_namespaces(node)
    return bool(spaces) and spaces <= _PLAIN


@functools.lru_cache(maxsize=1 << 12)
def source_name(source: Source) -> str:
    """What a value from outside is called: ``blocks_weight`` for ``blocks.0.weight``; inputs are numbered."""
    if source.kind == "input":
        return "input"
    parts = [p for p in str(source.key).split(".") if not p.isdigit()]
    parts = [*(["grad"] if source.kind == "grad" else []), *parts[-2:]]
    base = re.sub(r"\W", "_", "_".join(parts), flags=re.ASCII) or "p"
    if base == "input":
        return "input_"
    return f"p{base}" if base[0].isdigit() else base
