"""The program cut into blocks: one order, its cuts, and each block's own CD graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rkmate.graph.blocks.cut import CutSettings, cut
from rkmate.graph.blocks.lower import Program
from rkmate.graph.capture.captured import Source
from rkmate.ir.cd import HOISTED, CDGraph, DNode
from rkmate.torch_seam.nodes import sequence_number

SHARE = 128
LEAST = 1 << 16
KEPT_SHARE = 16
"""Bytes of gradients that may wait for others wherever they are made, so that a step is not cut into too many
functions: all gradients' bytes divided by `SHARE`, or `LEAST`, which in small steps is at most the bytes that
the forward keeps for the backward, divided by `KEPT_SHARE`."""
WORKING_SHARE = 32
"""Gradients may also take the bytes of the largest operation of their block (inputs and results) divided by
this number, if the next largest operation is smaller by as much."""


@dataclass(frozen=True)
class Block:
    """A block of the chain."""

    index: int
    c: tuple[int, ...]
    """The C nodes of the whole graph that it holds: forward, then backward."""
    d: tuple[int, ...]
    """The D nodes of the whole graph behind the local ones."""
    graph: CDGraph
    """The block's own CD graph, without costs."""


@dataclass(frozen=True)
class Partition:
    """A program in block order."""

    program: Program
    """C nodes: hoisted constants, forward blocks in order, backward blocks in reverse order."""
    block_of: tuple[int, ...]
    """Block of each C node; `HOISTED` for what is computed once at the start."""
    blocks: tuple[Block, ...]
    cuts: tuple[frozenset[int], ...]
    """D nodes that the forward carries into block i, for it or later ones to read."""
    grads: tuple[frozenset[int], ...]
    """D nodes that the backward carries out of block i (and, last, into the last block)."""
    segments: tuple[int, ...]
    """C nodes after which an autograd function ends and hands over what it made."""
    separators: int
    """Number of cuts that are 1-separators."""
    waiting: int | None = None
    """Bytes of gradients that may wait for others, as `CutSettings` says."""


@dataclass(frozen=True)
class Stages:
    """The program cut in another way: its nodes keep their numbers and their order."""

    blocks: tuple[Block, ...]
    cuts: tuple[frozenset[int], ...]
    grads: tuple[frozenset[int], ...]
    """`cuts` and `grads`: as in `Partition`."""


def partition(program: Program, settings: CutSettings = CutSettings()) -> Partition:
    """Cut the program's chain, order its nodes by blocks, and give each block its graph."""
    cd = program.cd
    blocks = cut(cd, program.constant, _origins(program), program.pinned, settings)
    forward = sorted(cd.forward, key=lambda i: blocks.of[i])
    backward = sorted(cd.backward, key=lambda i: -blocks.of[i])
    order = [*forward, *backward]
    return _in_order(program, order, tuple(blocks.of[i] for i in order), blocks.separators,
                     settings.waiting)


def rearranged(parts: Partition, orders: Sequence[Sequence[int]]) -> Partition:
    """Return the partition with each block's C nodes in another order: forward first, then backward."""
    order = list(range(len(parts.program.cd.c)))
    for block, local in zip(parts.blocks, orders, strict=True):
        for place, k in zip(block.c, local, strict=True):
            order[place] = block.c[k]
    return _in_order(parts.program, order, parts.block_of, parts.separators, parts.waiting)


def _in_order(program: Program, order: Sequence[int], of: tuple[int, ...], separators: int,
              waiting: int | None) -> Partition:
    """`of`: the block of each C node, in the new order."""
    cd, count = program.cd, max(of, default=HOISTED) + 1
    new_cd = replace(cd, c=tuple(cd.c[i] for i in order))
    place = {old: new for new, old in enumerate(order)}
    program = replace(program, cd=new_cd, operation=tuple(program.operation[i] for i in order),
                      constant=frozenset(place[i] for i in program.constant))
    segments, releases = _segments(program, of, waiting)
    program = replace(program, cd=replace(program.cd, releases=releases).verify())
    cuts, grads = _crossings(program.cd, of, count)
    pinned = frozenset(program.cd.outputs)
    parts = tuple(_block(program.cd, b, of, cuts, grads, pinned) for b in range(count))
    return Partition(program, of, parts, cuts, grads, segments, separators, waiting)


def cut_stages(program: Program, names: Sequence[str | None]) -> Stages:
    """Cut a partition's program between the stages that its C nodes belong to, where known."""
    cd = program.cd
    found = cut(cd, program.constant, _origins(program), program.pinned, stages=names)
    cuts, grads = _crossings(cd, found.of, found.count)
    pinned = frozenset(cd.outputs)
    blocks = tuple(_block(cd, b, found.of, cuts, grads, pinned) for b in range(found.count))
    return Stages(blocks, cuts, grads)


def _origins(program: Program) -> list[int | None]:
    """Return the forward node that each backward node was derived from: autograd's sequence numbers."""
    made: dict[int, int] = {}
    for i in program.cd.forward:
        number = sequence_number(program.operation[i])
        if number is not None:
            made[number] = i          # of several, the last is autograd's own
    # The gradient sums that autograd itself makes carry the number that comes next.
    newest = max(made, default=-1)
    result: list[int | None] = [None] * program.cd.loss
    for i in program.cd.backward:
        number = sequence_number(program.operation[i])
        result.append(made.get(number) if number is not None and number <= newest else None)
    return result


def _segments(program: Program, of: tuple[int, ...], waiting: int | None
              ) -> tuple[tuple[int, ...], Mapping[int, int]]:
    """Return where autograd functions end, and after which C node each parameter gradient leaves.

    A function ends with its block, and earlier when the gradients that it still holds weigh more than
    those that may wait (`SHARE`, `LEAST`, `KEPT_SHARE`, `WORKING_SHARE`): they leave before they could
    matter. A gradient leaves only when the backward has read its parameter for the last time, as in eager
    mode: an optimizer may change the parameter then.
    """
    cd = program.cd
    parts: dict[int, list[int]] = {}
    by_source: dict[Source, list[int]] = {}
    for source, node in program.param_grads:
        j = program.d_of(node)
        made = cd.producer[j] if j is not None else None
        if j is None or made is None or made < cd.loss:
            continue
        parts.setdefault(made, []).append(j)
        by_source.setdefault(source, []).append(j)
    total = sum(cd.d[j].size for js in parts.values() for j in js)
    kept = sum(cd.d[j].size for j in {j for i in cd.backward for j in cd.c[i].inputs}
               if (made := cd.producer[j]) is not None and made < cd.loss)
    limit = max(total // SHARE, min(LEAST, kept // KEPT_SHARE) if waiting is None else waiting)
    leaving = {j for js in parts.values() for j in js}
    work = {i: sum(cd.d[j].size for j in {*cd.c[i].inputs, *cd.c[i].outputs} - leaving) for i in cd.backward}
    most: dict[int, int] = {}
    for i, size in work.items():
        most[of[i]] = max(most.get(of[i], 0), size)
    read = {where: i for i in cd.backward for n in program.reads(i)
            if isinstance(where := program.storage[n], Source)}
    free: dict[int, int] = {}           # the C node after which the gradients of another one may leave
    for source, js in by_source.items():
        last = max(cd.producer[j] or 0 for j in js)
        free[last] = max(free.get(last, last), read.get(source, last))
    ends: list[int] = []
    pending = wait = 0
    for i in cd.backward:
        pending += sum(cd.d[j].size for j in parts.get(i, ()))
        wait = max(wait, free.get(i, i))
        last_of_block = i + 1 == len(cd.c) or of[i + 1] != of[i]
        room = 0 if last_of_block else min(most[of[i]] // WORKING_SHARE, most[of[i]] - work[i + 1])
        if last_of_block or (pending and i >= wait and pending >= max(limit, room)):
            ends.append(i)
            pending = 0
    releases: dict[int, int] = {}
    following = iter(ends)
    end = next(following, None)
    for i in cd.backward:
        while end is not None and end < i:
            end = next(following, None)
        for j in parts.get(i, ()):
            assert end is not None
            releases[j] = end
    # Autograd adds up the parts of a shared parameter in the first one, which stays to the end.
    for js in by_source.values():
        releases[js[0]] = max(releases[j] for j in js)
    return tuple(ends), releases


def _crossings(cd: CDGraph, of: tuple[int, ...], count: int) -> tuple[tuple[frozenset[int], ...],
                                                                      tuple[frozenset[int], ...]]:
    cuts: list[set[int]] = [set() for _ in range(count + 1)]
    grads: list[set[int]] = [set() for _ in range(count + 1)]
    final = set(cd.input_grads)
    for j in range(len(cd.d)):
        made = cd.producer[j]
        if made is None and j not in cd.output_grads:
            continue
        if made is not None and made < cd.loss:
            if of[made] == HOISTED:
                continue
            last = max([of[made], *(of[r] for r in cd.readers[j] if r < cd.loss)])
            for b in range(of[made] + 1, last + 1):
                cuts[b].add(j)
        else:
            start = count if made is None else of[made]
            ends = [of[r] for r in cd.readers[j]]
            if j in cd.releases:
                ends.append(of[cd.releases[j]])
            low = -1 if j in final else min(ends, default=start)
            for b in range(low + 1, start + 1):
                grads[b].add(j)
    return tuple(map(frozenset, cuts)), tuple(map(frozenset, grads))


def _block(cd: CDGraph, b: int, of: tuple[int, ...], cuts: tuple[frozenset[int], ...],
           grads: tuple[frozenset[int], ...], pinned: frozenset[int]) -> Block:
    c = [i for i in range(len(cd.c)) if of[i] == b]
    loss = sum(i < cd.loss for i in c)
    made = {j for i in c for j in cd.c[i].outputs}
    touched = [j for i in c for j in (*cd.c[i].inputs, *cd.c[i].outputs)]
    incoming, outgoing = sorted(grads[b + 1]), sorted(grads[b])
    d = list(dict.fromkeys([*sorted(cuts[b]), *touched, *incoming, *outgoing]))
    local = {j: k for k, j in enumerate(d)}
    nodes = tuple(DNode(cd.d[j].name, 0 if j in pinned else cd.d[j].size, cd.d[j].kind) for j in d)
    loss_grads = set(incoming)
    inputs = tuple(local[j] for j in d if j not in made and j not in loss_grads)
    end = {i: k for k, i in enumerate(c)}
    releases = {local[j]: end[i] for j, i in cd.releases.items() if i in end and j in local}
    graph = CDGraph(
        nodes,
        tuple([cd.c[i].renumbered(local) for i in c]),
        loss, inputs, tuple(local[j] for j in sorted(cuts[b + 1] | pinned) if j in made),
        tuple(local[j] for j in incoming), tuple(local[j] for j in outgoing), releases)
    return Block(b, tuple(c), tuple(d), graph.verify())

