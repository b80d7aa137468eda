"""From a schedule to the slices that run it. Nothing is left to decide at run time.

The schedule is first cut into stretches, where one function ends and the next begins. A stretch is of one
block, and becomes one slice. Copies stand between stretches: what one reads has arrived before it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from rkmate.codegen import slices
from rkmate.codegen.alike import Alike, Way, source_name
from rkmate.codegen.liveness import Computed, Flow, Freed, flow
from rkmate.codegen.slices import (
    RESERVED,
    Copy,
    CopyWord,
    Count,
    Draws,
    Drop,
    Enter,
    Function,
    Listing,
    Look,
    Run,
    Slice,
    Write,
)
from rkmate.codegen.spelling import Spelled, Views
from rkmate.graph.blocks.expressions import local_names, source_key
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.captured import Source
from rkmate.ir.calls import Argument, Constant, Held, Name, NameTable
from rkmate.ir.cd import HOISTED, CDGraph
from rkmate.ir.schedule import (
    Compute,
    CopyIn,
    CopyOut,
    Free,
    Leave,
    Loss,
    Schedule,
    Start,
    kernel_of,
)
from rkmate.torch_seam.nodes import VALUE

# -- Stretches -------------------------------------------------------------------------------------

_WORDS: dict[type, CopyWord] = {CopyOut: "copy_out", Leave: "leave", CopyIn: "copy_in"}


@dataclass
class BlockSteps:
    """Steps of one block that become one slice."""

    block: int
    steps: list[Compute | Free | Start] = field(default_factory=list)
    closed: bool = False
    """Whether the stretch ends with what is freed without having been read in it."""
    touched: set[int] = field(default_factory=set, repr=False)
    """Nodes that its computations read and make."""

    def add(self, step: Compute | Free | Start, cd: CDGraph) -> None:
        if isinstance(step, Compute | Start):
            self.touched.update(cd.c[step.c].inputs, cd.c[step.c].outputs)
        else:
            self.closed = self.closed or step.d not in self.touched
        self.steps.append(step)


@dataclass(frozen=True)
class Copied:
    """A D node goes away, or comes back."""

    word: CopyWord
    d: int


Part = BlockSteps | Copied


@dataclass(frozen=True)
class Stretches:
    """Stretches of a whole schedule."""

    before: list[Part] = field(default_factory=list)
    """Parts of the forward."""
    at_loss: list[int] = field(default_factory=list)
    """D nodes that are freed at the loss."""
    segments: list[tuple[list[Part], int]] = field(default_factory=list)
    """Per segment of the backward: its parts, and the C node that ends it."""


def cut_schedule(cd: CDGraph, schedule: Schedule, block_of: Sequence[int], ends: Sequence[int]) -> Stretches:
    """Cut a schedule into stretches. `block_of`: the block of each C node. `ends`: the C nodes that end
    segments of the backward."""
    result = Stretches()
    last = set(ends)
    current: list[Part] | None = result.before      # None: between the loss and what is computed next
    closing: int | None = None
    coming: set[int] = set()
    for step in schedule.steps:
        if isinstance(step, Loss):
            current = None
            continue
        if isinstance(step, Free) and current is None:
            result.at_loss.append(step.d)
            continue
        if isinstance(step, Free) and current and isinstance(current[-1], BlockSteps):
            current[-1].add(step, cd)
            continue
        if current is None:
            current = []
        if closing is not None:
            result.segments.append((current, closing))
            current, closing = [], None
        if isinstance(step, Free):                  # after a copy
            current.append(BlockSteps(_block_before(current)))
        elif isinstance(step, Compute | Start):
            arriving = sorted(coming.intersection(cd.c[step.c].inputs))
            coming.difference_update(arriving)
            current += [Copied("arrive", d) for d in arriving]
            block = block_of[step.c]
            end = current[-1] if current else None
            if not isinstance(end, BlockSteps) or end.block != block or end.closed:
                current.append(BlockSteps(block))
            if step.c in last and isinstance(step, Compute):
                closing = step.c
        else:
            current.append(Copied(_WORDS[type(step)], step.d))
            if isinstance(step, CopyIn):
                coming.add(step.d)
            continue
        end = current[-1]
        assert isinstance(end, BlockSteps)
        end.add(step, cd)
    if closing is not None and current is not None:
        result.segments.append((current, closing))
    return result


def _block_before(parts: Sequence[Part]) -> int:
    return next((p.block for p in reversed(parts) if isinstance(p, BlockSteps)), 0)


# -- Slices ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Segment:
    """Work of one autograd function in the backward."""

    function: str
    """Name of the generated function."""
    params: tuple[str, ...]
    """Parameters whose gradients it returns, in order."""
    added: tuple[str, ...] = ()
    """Parameters whose gradients it adds to what they have."""


def listing_of(partition: Partition, schedule: Schedule, labels: Sequence[str] | None = None,
               summary: str = "", graph: CDGraph | None = None) -> tuple[Listing, tuple[Segment, ...]]:
    """Return the functions of a schedule that the simulator has accepted, and the segments of its backward.

    `labels`: names of the blocks' classes; blocks with the same one share functions. `graph`: the
    partition's graph with costs, for the comments.
    """
    return _Maker(partition, schedule, labels, graph).listing(summary)


class _Maker:
    def __init__(self, partition: Partition, schedule: Schedule, labels: Sequence[str] | None,
                 graph: CDGraph | None) -> None:
        self.partition = partition
        self.program = partition.program
        self.cd = graph or self.program.cd
        self.schedule = schedule
        self.labels = labels
        self.repeated = schedule.recomputed()
        self.ran: set[int] = set()
        self.stored: set[int] = set()
        """D nodes in the environment."""
        self.started: set[int] = set()
        """C nodes that were started, and not waited for."""
        self.names: dict[int, tuple[dict[int, str], NameTable]] = {}
        """Of each block's values, and the table that they were taken from."""
        self.view_keys: dict[Any, int] = {}
        """Numbers of the program's views, for `Views`."""
        self.alike = Alike(partition, labels)
        self.handed = {j: (s, n) for s, n in self.program.param_grads
                       if (j := self.program.d_of(n)) is not None}
        """Parameter gradients: autograd frees them."""

    def listing(self, summary: str) -> tuple[Listing, tuple[Segment, ...]]:
        cut = cut_schedule(self.cd, self.schedule, self.partition.block_of, self.partition.segments)
        body: list[Enter | Drop | Copy | Write | Count] = [c for s in cut.before for c in self._steps(s)]
        made = [self._forward_end(body, cut.at_loss)]
        self.stored.update(self.cd.output_grads)
        segments: list[Segment] = []
        stretches: list[BlockSteps] = []
        calls: list[Enter | Drop | Copy] = []
        for number, (parts, end) in enumerate(cut.segments):
            last = number + 1 == len(cut.segments)
            stretches += [s for s in parts if isinstance(s, BlockSteps)]
            calls += [c for s in parts for c in self._steps(s)]
            params, returns, pops = self._gradients(end, last)
            added = tuple(dict.fromkeys(
                p for s in stretches for c in s.steps if isinstance(c, Compute) for p in self._added(c.c)))
            if not (params or added or last):       # nothing for autograd: it runs with the next one
                continue
            name = f"backward_{len(segments)}"
            where = sorted({s.block for s in stretches}, reverse=True)
            made.append(Function(name, f"block {', '.join(map(str, where))}", tuple(calls), returns, pops))
            segments.append(Segment(name, params, added))
            stretches, calls = [], []
        arriving = tuple(self._key(j) for j in self.cd.output_grads)
        return Listing(summary, tuple(made), arriving), tuple(segments)

    # -- one slice ------------------------------------------------------------------------

    def _steps(self, part: Part) -> Sequence[Enter | Drop | Copy]:
        if isinstance(part, BlockSteps):
            return self._calls(part)
        if part.word == "leave":
            self.stored.discard(part.d)
        elif part.word == "copy_in":
            self.stored.add(part.d)
        return [Copy(part.word, self._key(part.d))]

    def _calls(self, part: BlockSteps) -> list[Enter | Drop]:
        found = flow(self.cd, part.steps, self.stored, self.handed, self.started)
        for do in found.body:
            if isinstance(do, Computed) and isinstance(do.step, Start):
                self.started.add(do.step.c)
            elif isinstance(do, Computed) and do.waits:
                self.started.remove(do.step.c)
        if not found.body:
            self.stored = found.after(self.stored)
            return [Drop(self._keys(found.drop))]
        rng: list[str] = []
        ways = [self._way(do, rng) for do in found.body if isinstance(do, Computed)]
        stretch = self.alike.stretched(part.block, found, ways)
        known = None if stretch is None else self.alike.get(stretch)
        if known is None or stretch is None:
            made, give, sources = self._slice(part, found, ways)
            if stretch is not None:
                self.alike.keep(stretch, made, give, sources)
        else:
            made = known.slice
            give = [stretch.block.d[k] for k in known.give]
            sources = [stretch.sources[k] for k in known.sources]
        call = Enter(made, self._keys(found.take), self._keys(found.read),
                     tuple(map(source_key, sources)), self._keys(give), tuple(rng))
        self.stored = found.after(self.stored)
        return [call, Drop(self._keys(found.drop))] if found.drop else [call]

    def _way(self, do: Computed, rng: list[str]) -> Way:
        """Return how a computation runs here. `rng`: names of the slice's repeated draws, to which it adds
        its own."""
        c, node = do.step.c, self.cd.c[do.step.c]
        draws: Draws = ""
        state = None
        if node.random:
            draws = "draw" if c not in self.repeated else "replay" if c in self.ran else "remember"
            if c in self.repeated:
                state = len(rng)
                rng.append(node.name)
        again = None
        if not do.waits:
            again = node.time if isinstance(do.step, Start) else kernel_of(self.cd, do.step).time
            again = again if c in self.ran else None
            self.ran.add(c)
        return Way(again, draws, state, node.adds)

    def _slice(self, part: BlockSteps, found: Flow,
               ways: Sequence[Way]) -> tuple[Slice, Sequence[int], Sequence[Source]]:
        """Return a stretch as a function, the D nodes that it gives, and the sources of its inputs."""
        naming = self._naming(part.block)
        views = Views(self.program, naming, [self.program.operation[do.step.c] for do in found.body
                                             if isinstance(do, Computed) and not do.waits], self.view_keys)
        expressions = Spelled(self.program, naming, views)
        body: list[Run | Look | slices.Free] = []
        following = iter(ways)
        for do in found.body:
            if isinstance(do, Computed):
                run = self._run(do, next(following), expressions, naming)
                body += [*views.take_new(), run]
            else:
                body.append(_free(do, naming, views, self.cd))
        give = tuple(j for j in naming.local if j in found.give)
        label = "constants" if part.block == HOISTED else \
            f"block_{self.labels[part.block] if self.labels else part.block}"
        phase = "backward" if any(not isinstance(s, Free) and s.c >= self.cd.loss for s in part.steps) \
            else "forward"
        made = Slice(f"{label}_{phase}", naming.names(found.take),
                     naming.names(found.read), tuple(naming.sources.values()), tuple(body),
                     naming.names(give), sum(way.state is not None for way in ways))
        return made, give, tuple(naming.sources)

    def _naming(self, block: int) -> LocalNames:
        """Return the names of a block's values, for one slice."""
        naming = LocalNames()
        if block not in self.names:
            whole = None if block == HOISTED else self.partition.blocks[block]
            c = tuple(i for i, b in enumerate(self.partition.block_of) if b == HOISTED) if whole is None \
                else whole.c
            self.names[block] = local_names(self.program, whole, c, naming.table), naming.table
        names, table = self.names[block]
        naming.local, naming.table = {**names}, table.copied()
        return naming

    def _run(self, do: Computed, way: Way, expressions: Spelled, naming: LocalNames) -> Run:
        c = do.step.c
        node = self.program.operation[c]
        if isinstance(do.step, Start):
            call = expressions.call_started(node)
        elif do.waits:
            call = expressions.call_waiting(naming.value(self.cd.c[c].outputs[0]))
        elif do.step.kernel:
            call = expressions.call_alternative(node, do.step.kernel - 1)
        elif do.donor is not None:
            call = expressions.call_in_place(node, do.donor)
        else:
            call = expressions.call(node)
        results = node.meta[VALUE]
        several = isinstance(results, (tuple, list))
        makes: list[str | None] = [None] * (len(results) if several else 1)
        for j in do.keeps:
            makes[self.program.position[j] or 0] = naming.name(j)
        return Run(call, tuple(makes), several, None if do.donor is None else naming.name(do.donor),
                   way.again, way.draws, way.adds, way.state)

    def _added(self, c: int) -> list[str]:
        """Return the parameters whose gradients a computation adds to."""
        nodes = self.program.operation[c].all_input_nodes if self.cd.c[c].adds else ()
        return [str(s.key) for n in nodes if isinstance(s := self.program.storage[n], Source)
                and s.kind == "grad"]

    def _key(self, j: int) -> str:
        return self.cd.d[j].name

    def _keys(self, ds: Collection[int]) -> tuple[str, ...]:
        return tuple(map(self._key, ds))

    # -- what leaves the functions --------------------------------------------------------

    def _value(self, node: fx.Node, pops: Collection[int] = ()) -> Argument:
        return Spelled(self.program, InEnvironment(self.cd, pops)).value(node)

    def _forward_end(self, body: list[Enter | Drop | Copy | Write | Count],
                     at_loss: Sequence[int]) -> Function:
        """Return the end of the forward: it writes overwritten tensors, and returns the outputs, and then the
        values kept for outputs that are computed later."""
        written = {self.program.d_of(n) for _, n in self.program.overwritten}
        gone = [j for j in at_loss if j in self.stored and j not in self.program.pinned]
        early = self._keys([j for j in gone if j not in written])
        late = self._keys(sorted(j for j in gone if j in written))
        body += [Drop(early)] if early else []
        body += [Write(source_key(s), self._value(n)) for s, n in self.program.overwritten]
        for by in dict.fromkeys(by for _, by in self.program.joint.counters):
            body.append(Count(tuple(source_key(s) for s, n in self.program.joint.counters if n == by), by))
        body += [Drop(late)] if late else []
        results = (*self.program.joint.outputs, *self.program.joint.kept)
        forgotten = self.program.only_returned(self.schedule)
        last = {j: i for i, n in enumerate(results) if n is not None
                and (j := self.program.d_of(n)) is not None and j in forgotten}
        self.stored.difference_update(gone)
        return Function("forward", "the forward, up to the loss", tuple(body), tuple(
            Constant("None") if n is None else self._value(n, [j for j, k in last.items() if k == i])
            for i, n in enumerate(results)))

    def _gradients(self, end: int,
                   last: bool) -> tuple[tuple[str, ...], tuple[Argument, ...], tuple[str, ...]]:
        """Return, for the segment that ends with C node `end`: the parameters, the returned values, and the
        keys that returning them takes out of the environment."""
        ends = self.partition.segments
        k = ends.index(end)
        first = ends[k - 1] + 1 if k else self.cd.loss
        mine = [j for j in self.handed if (made := self.cd.producer[j]) is not None and first <= made <= end]
        params = tuple(str(self.handed[j][0].key) for j in mine)
        returns = [self._value(self.handed[j][1], {j}) for j in mine]
        if last:
            returns += [self._value(n) for _, n in self.program.input_grads]
        self.stored.difference_update(mine)
        return params, tuple(returns), self._keys(mine)


def _free(do: Freed, naming: LocalNames, views: Views, cd: CDGraph) -> slices.Free:
    return slices.Free(naming.names(do.d), sum(cd.d[j].size for j in do.d if j != do.donor), views.end(do.d))


class LocalNames:
    """Names of what one generated function reads and makes."""

    def __init__(self) -> None:
        self.table = NameTable(RESERVED)
        self.local: dict[int, str] = {}
        """Of D nodes."""
        self.sources: dict[Source, str] = {}

    def name(self, j: int) -> str:
        """Return the name of a D node."""
        if j not in self.local:
            self.local[j] = self.table.fresh("v")
        return self.local[j]

    def names(self, ds: Collection[int]) -> tuple[str, ...]:
        """Return the names of D nodes."""
        return tuple(map(self.name, ds))

    def value(self, j: int) -> Name:
        """Return a D node's tensor."""
        return Name(self.name(j))

    def source(self, source: Source) -> Name:
        """Return what the caller holds."""
        if source not in self.sources:
            self.sources[source] = self.table.fresh(source_name(source))
        return Name(self.sources[source])


class InEnvironment:
    """Outside the slices everything comes from the environment."""

    def __init__(self, cd: CDGraph, pops: Collection[int]) -> None:
        self.cd = cd
        self.pops = pops

    def value(self, j: int) -> Held:
        """Return a D node's tensor, which may be taken out."""
        return Held(self.cd.d[j].name, "ends" if j in self.pops else "stays")

    def source(self, source: Source) -> Held:
        """Return what the caller holds."""
        return Held(source_key(source), "source")
