"""The CD graph: computations and data, forward and backward, without torch.

Rockmate (ICML 2023), section 3.2 and appendix A.6. Sizes are bytes, times are seconds. Nodes are
named by their index: ``graph.c[i]`` is a computation, ``graph.d[j]`` a storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from rkmate.errors import GraphError
from rkmate.ir.link import Link

DKind = Literal["data", "saved", "grad"]
Phase = Literal["forward", "backward"]
HOISTED = -1
"""Block number of the hoisted constants: computed once at the start and kept."""


@dataclass(frozen=True, slots=True)
class DNode:
    """A storage. Views of it are statements of its users, never nodes."""

    name: str
    size: int
    """Bytes that the allocator hands out for it; 0 for what somebody else holds anyway."""
    kind: DKind = "data"
    """``data``: a forward value. ``saved``: a forward value that only the backward reads (the
    paper's phantom). ``grad``: a value of the backward."""


class Kernel(NamedTuple):
    """A way to run a computation."""

    time: float
    """Seconds."""
    overhead: int
    """Bytes allocated and freed again while it runs, beyond inputs and outputs."""


class Cost(NamedTuple):
    """Time and memory of a computation."""

    time: float
    """Seconds."""
    overhead: int
    """Bytes allocated and freed again while it runs, beyond inputs and outputs."""
    alternatives: tuple[Kernel, ...] = ()
    """Costs of other kernels (`CNode.alternatives`)."""

    def row(self) -> list[Any]:
        """Return the cost as a JSON list."""
        return [self.time, self.overhead, *map(list, self.alternatives)]


def read_cost(row: Any) -> Cost:
    """Inverse of `Cost.row`. Raises `TypeError` or `ValueError` if the row is malformed."""
    time, overhead, *alternatives = row
    return Cost(float(time), int(overhead), tuple(Kernel(float(t), int(o)) for t, o in alternatives))


@dataclass(frozen=True, slots=True)
class CNode:
    """A computation."""

    name: str
    phase: Phase
    inputs: tuple[int, ...]
    """D nodes that must be in memory while it runs."""
    outputs: tuple[int, ...]
    """D nodes that it creates; all of them, each time it runs."""
    time: float = 0.0
    overhead: int = 0
    """Bytes allocated and freed again while it runs, beyond inputs and outputs."""
    random: bool = False
    """Draws from a generator: a recomputation restores the generator's state."""
    donors: tuple[int, ...] = ()
    """Inputs that may take the (only) output's place when they die here: no bytes are allocated
    then."""
    alternatives: tuple[Kernel, ...] = ()
    """Other kernels of a computation that works part by part, with fewer and larger parts. Each may take
    more memory than `overhead` says, and overwrites no donor."""
    decides: bool = False
    """Whether the computation makes a choice (such as a router's) that must stand: it runs once, and its
    outputs stay in memory from then on."""
    adds: bool = False
    """Whether the computation adds to a gradient that the caller holds: it belongs to the backward, and runs
    once."""
    exchanges: bool = False
    """Whether the computation is a collective, which can run while others do."""

    def renumbered(self, d: Mapping[int, int]) -> CNode:
        """Return a copy over D nodes with other numbers."""
        return CNode(self.name, self.phase, tuple([d[j] for j in self.inputs]),
                     tuple([d[j] for j in self.outputs]), self.time, self.overhead, self.random,
                     tuple([d[j] for j in self.donors]), self.alternatives, self.decides, self.adds,
                     self.exchanges)


@dataclass(frozen=True)
class CDGraph:
    """C and D nodes of a block (or of a whole model) in one topological order.

    The loss stands between ``c[loss - 1]`` and ``c[loss]``: forward nodes before, backward nodes
    after it.
    """

    d: tuple[DNode, ...]
    c: tuple[CNode, ...]
    loss: int
    """Index of the first backward node; ``len(c)`` when there is none."""
    inputs: tuple[int, ...] = ()
    """D nodes without a producer that are there from the start and stay: held by somebody else,
    counted by nobody here."""
    outputs: tuple[int, ...] = ()
    """Forward D nodes that the next block reads (or that the user gets). They are there when the
    backward starts."""
    output_grads: tuple[int, ...] = ()
    """Grad D nodes without a producer: they arrive at the loss and are counted from there on,
    until their last reader has run."""
    input_grads: tuple[int, ...] = ()
    """Grad D nodes that outlive the graph: what the block before (or the caller) reads."""
    releases: Mapping[int, int] = field(default_factory=dict)
    """Parameter gradients: D node -> index of the C node after which it leaves memory (the end of
    the autograd function that hands it over)."""
    link: Link | None = None
    """Connection to the place where data can be sent meanwhile; None: nowhere."""
    once: frozenset[int] = frozenset()
    """Forward C nodes that never run again: the user wants what they make kept."""
    forgotten: frozenset[int] = frozenset()
    """Forward D nodes that are not in memory at the loss: the user wants them computed again."""
    held: tuple[int, ...] = ()
    """D nodes that are never freed: the user holds the outputs, and autograd the gradient of a scalar that a
    backward starts from."""
    reserve_at_loss: int = 0
    """Bytes that the loss, computed outside of the graph, allocates for itself. A few of them (the loss
    itself, the number one that its backward starts from) stay to the end."""

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """The C node that creates each D node; None for those that come from outside."""
        result: list[int | None] = [None] * len(self.d)
        for i, c in enumerate(self.c):
            for o in c.outputs:
                result[o] = i
        return tuple(result)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The C nodes that read each D node, in order."""
        result: list[list[int]] = [[] for _ in self.d]
        for i, c in enumerate(self.c):
            for j in c.inputs:
                result[j].append(i)
        return tuple(tuple(r) for r in result)

    @cached_property
    def decided(self) -> frozenset[int]:
        """D nodes that are outcomes of a C node that decides: made once, never freed."""
        return frozenset(o for c in self.c if c.decides for o in c.outputs)

    @cached_property
    def wiring(self) -> tuple[object, ...]:
        """The computations without their costs, and how many storages there are: the same at other sizes."""
        return self.loss, len(self.d), tuple([(c.name, c.inputs, c.outputs, c.donors) for c in self.c])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all D nodes together."""
        return sum([d.size for d in self.d])

    @property
    def forward(self) -> range:
        """Indices of the forward C nodes."""
        return range(self.loss)

    @property
    def backward(self) -> range:
        """Indices of the backward C nodes."""
        return range(self.loss, len(self.c))

    def bytes(self, ds: object) -> int:
        """Sum of the sizes of some D nodes."""
        return sum(self.d[j].size for j in ds)  # type: ignore[attr-defined]

    def with_costs(self, costs: Iterable[Cost | CNode]) -> CDGraph:
        """Return a copy of the graph with the costs of each C node, in order."""
        return replace(self, c=tuple([
            CNode(c.name, c.phase, c.inputs, c.outputs, cost.time, cost.overhead, c.random, c.donors,
                  cost.alternatives, c.decides, c.adds, c.exchanges)
            for c, cost in zip(self.c, costs, strict=True)]))

    def with_reserve(self, reserve_at_loss: int) -> CDGraph:
        """Return a copy of the graph with other bytes for the loss."""
        return replace(self, reserve_at_loss=reserve_at_loss)

    def verify(self) -> CDGraph:
        """Check the invariants that every later stage relies on; returns the graph itself."""
        made: dict[int, int] = {}
        external = set(self.inputs) | set(self.output_grads)
        for i, c in enumerate(self.c):
            if (c.phase == "forward") != (i < self.loss):
                raise GraphError(f"{c.name}: a {c.phase} node on the wrong side of the loss")
            if c.adds and i < self.loss:
                raise GraphError(f"{c.name} adds to a gradient, and is of the forward")
            for j in c.inputs:
                if j not in made and j not in external:
                    raise GraphError(f"{c.name} reads {self.d[j].name} before anything creates it")
                if j in self.output_grads and i < self.loss:
                    raise GraphError(f"{c.name} reads the gradient {self.d[j].name} in the forward")
            for j in c.outputs:
                if j in made or j in external:
                    raise GraphError(f"{self.d[j].name} has two producers")
                made[j] = i
        for j in (*self.outputs, *self.input_grads):
            if j not in made and j not in external:
                raise GraphError(f"{self.d[j].name} leaves the graph, but nothing creates it")
        for j, i in self.releases.items():
            if made.get(j, len(self.c)) > i and j not in self.output_grads:
                raise GraphError(f"{self.d[j].name} leaves before it is made")
        return self


def missing_nodes(graph: CDGraph, wanted: Iterable[int], available: Iterable[int] = (),
                  known: Collection[int] = ()) -> set[int]:
    """Return the forward nodes that must run to bring the D nodes `wanted` into memory.

    `available`: D nodes that are in memory. `known`: C nodes that run anyway, and whatever they need;
    they are left out. What comes from outside, and gradients, are taken to be there.
    """
    there = available if isinstance(available, set | frozenset) else frozenset(available)
    found: set[int] = set()
    todo = [j for j in wanted if j not in there]
    while todo:
        i = graph.producer[todo.pop()]
        if i is not None and i < graph.loss and i not in found and i not in known:
            found.add(i)
            todo += [j for j in graph.c[i].inputs if j not in there]
    return found
