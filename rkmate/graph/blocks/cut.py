"""Cut a CD graph into a chain of blocks (Rockmate, appendix A.4).

First at 1-separators: places in the forward order where only one storage is alive. If a stretch between them
is too long for an integer program, then at *frontier cuts*: places where the storages alive across the cut
take few bytes. Backward nodes then join the block whose data they need.

No torch: indices, sizes and edges only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rkmate.errors import ArgumentError
from rkmate.ir.cd import HOISTED, CDGraph


@dataclass(frozen=True)
class CutSettings:
    """Limits of blocks (their lengths in forward computations), and of the gradients that wait in them."""

    least: int = 4
    """Least length of a block: shorter ones join their neighbour."""
    most: int = 45
    """Greatest length of a stretch between 1-separators: longer ones get frontier cuts, where both parts are
    at least as long as `least`."""
    waiting: int | None = None
    """Bytes of gradients of parameters that may wait for others wherever they are made, so that a step has
    few functions; 1/128 of all gradients may always wait. None: 64 KiB, and in small steps 1/16 of what
    the forward keeps for the backward."""

    def __post_init__(self) -> None:
        if self.waiting is not None and (type(self.waiting) is not int or self.waiting < 0):
            raise ArgumentError(f"waiting is {self.waiting!r}; it should be a number of bytes, or None")
        for name in ("least", "most"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} is {value!r}; it should be a whole number of at least 1")
        if self.least > self.most:
            raise ArgumentError(f"least is {self.least} and most {self.most}; least should not be more")


@dataclass(frozen=True)
class Blocks:
    """The block of each C node."""

    of: tuple[int, ...]
    count: int
    separators: int
    """Number of cuts that are 1-separators."""


def cut(cd: CDGraph, constant: frozenset[int], origin: Sequence[int | None], pinned: Sequence[int],
        settings: CutSettings = CutSettings(), stages: Sequence[str | None] | None = None) -> Blocks:
    """Assign every C node to a block.

    `constant`: C nodes that depend on no trained value. `origin`: for each backward node the
    forward node that autograd derived it from, where known. `pinned`: D nodes that are kept anyway.
    `stages`: for each C node the stage that it is of, where known. Cuts then stand between stages,
    where one storage alone is alive, however short the blocks; and the backward, block after block,
    runs in the graph's order.
    """
    chain = [i for i in cd.forward if i not in constant]
    widths = _frontier(cd, chain, set(pinned))
    if stages is None:
        cuts, separators = _choose(widths, len(chain), settings)
    else:
        cuts = _between(widths, [stages[i] for i in chain])
        separators = set(cuts)
    while True:
        of = _assign_forward(cd, chain, cuts)
        wrong = _assign_backward(cd, of, origin, set(pinned), len(cuts) + 1)
        if wrong is None and stages is not None:
            wrong = _out_of_order(cd, of)
        if wrong is None:
            break
        low, high = wrong
        kept = [p for k, p in enumerate(cuts) if not low <= k < high]
        assert len(kept) < len(cuts)
        cuts = kept
    _assign_constants(cd, of, constant, set(pinned))
    return Blocks(tuple(of), len(cuts) + 1, sum(p in separators for p in cuts))


def _frontier(cd: CDGraph, chain: list[int], pinned: set[int]) -> list[tuple[int, int]]:
    """Return, for each gap after ``chain[p]``, how many storages are alive across it, and their bytes."""
    place = {i: p for p, i in enumerate(chain)}
    events: list[list[tuple[int, int]]] = [[] for _ in range(len(chain) + 1)]
    for p, i in enumerate(chain):
        for j in cd.c[i].outputs:
            last = max((place[r] for r in cd.readers[j] if r in place), default=p)
            if last > p and j not in pinned and cd.d[j].size:
                events[p].append((1, cd.d[j].size))
                events[last].append((-1, -cd.d[j].size))
    result = []
    count = size = 0
    for p in range(len(chain)):
        for n, b in events[p]:
            count += n
            size += b
        result.append((count, size))
    return result


def _choose(widths: list[tuple[int, int]], n: int, settings: CutSettings) -> tuple[list[int], set[int]]:
    """Return the positions p of cuts (a cut is after the p-th forward node), and those of them that are
    1-separators."""
    separators = [p for p in range(n - 1) if widths[p][0] <= 1]
    cuts: list[int] = []
    start = 0
    for p in separators:
        if p + 1 - start >= settings.least and n - p - 1 >= settings.least:
            cuts.append(p)
            start = p + 1
    chosen: list[int] = []
    edges = [-1, *cuts, n - 1]
    for a, b in zip(edges, edges[1:], strict=False):
        chosen += _split(widths, a + 1, b, settings)
        if b < n - 1:
            chosen.append(b)
    return sorted(chosen), set(cuts)


def _split(widths: list[tuple[int, int]], first: int, last: int, settings: CutSettings) -> list[int]:
    """Return frontier cuts inside ``first..last``: narrow places, until no piece is too long."""
    result: list[int] = []
    pieces = [(first, last)]
    while pieces:
        a, b = pieces.pop()
        if b - a + 1 <= settings.most or b - a + 1 < 2 * settings.least:
            continue
        # Away from the ends, the narrowest places; equal ones (one per layer) all at once.
        inner = range(a + settings.least - 1, b - settings.least + 1)
        narrowest = min(widths[p][1] for p in inner)
        places: list[int] = []
        for p in inner:
            if widths[p][1] <= narrowest * 1.02 and (not places or p - places[-1] >= settings.least):
                places.append(p)
        result += places
        edges = [a - 1, *places, b]
        pieces += [(x + 1, y) for x, y in zip(edges, edges[1:], strict=False)]
    return result


def _between(widths: list[tuple[int, int]], stages: Sequence[str | None]) -> list[int]:
    """Return the positions after which one stage ends and another begins, with one storage alive.

    What belongs to no stage joins the one before.
    """
    cuts: list[int] = []
    here: str | None = None
    for p, stage in enumerate(stages):
        if stage is None:
            continue
        if here is not None and stage != here and widths[p - 1][0] <= 1:
            cuts.append(p - 1)
        here = stage
    return cuts


def _out_of_order(cd: CDGraph, of: Sequence[int]) -> tuple[int, int] | None:
    """Return a range of cuts to drop when a backward node of an earlier block comes before one of a later
    block in the graph's order."""
    least: int | None = None
    for i in cd.backward:
        if least is not None and of[i] > least:
            return least, of[i]
        least = of[i]
    return None


def _assign_forward(cd: CDGraph, chain: list[int], cuts: list[int]) -> list[int]:
    of = [HOISTED] * len(cd.c)
    block = 0
    ends = set(cuts)
    for p, i in enumerate(chain):
        of[i] = block
        block += p in ends
    return of


def _assign_backward(cd: CDGraph, of: list[int], origin: Sequence[int | None], pinned: set[int],
                     count: int) -> tuple[int, int] | None:
    """Assign backward nodes in place; returns a range of cuts to drop when that is impossible."""
    # From its producer's block to the last one that reads it, a forward storage is in reach.
    reach = [count - 1] * len(cd.d)
    for j in range(len(cd.d)):
        made = cd.producer[j]
        if made is not None and made < cd.loss and of[made] != HOISTED and j not in pinned:
            reach[j] = max([of[made], *(of[r] for r in cd.readers[j] if r < cd.loss)])
    loose: list[int] = []
    for i in cd.backward:
        bound = count - 1
        anchored = False
        o = origin[i]
        if o is not None and of[o] != HOISTED:
            bound, anchored = of[o], True
        low = 0
        for j in cd.c[i].inputs:
            made = cd.producer[j]
            if made is None:
                anchored = True
            elif made >= cd.loss:
                bound, anchored = min(bound, of[made]), True
            elif of[made] != HOISTED:
                bound, low, anchored = min(bound, reach[j]), max(low, of[made]), True
        if low > bound:
            return bound, low
        of[i] = bound
        if not anchored:
            loose.append(i)
    for i in reversed(loose):
        readers = [of[r] for j in cd.c[i].outputs for r in cd.readers[j]]
        of[i] = max(readers, default=0)
    return None


def _assign_constants(cd: CDGraph, of: list[int], constant: frozenset[int], pinned: set[int]) -> None:
    """Assign a constant that one block alone reads to that block; hoist the others."""
    leaving = pinned | set(cd.outputs)
    for i in sorted(constant, reverse=True):
        readers = {of[r] for j in cd.c[i].outputs for r in cd.readers[j]}
        outside = any(j in leaving for j in cd.c[i].outputs)
        backward_only = not any(r < cd.loss for j in cd.c[i].outputs for r in cd.readers[j])
        of[i] = readers.pop() if len(readers) == 1 and not outside and not backward_only else HOISTED
