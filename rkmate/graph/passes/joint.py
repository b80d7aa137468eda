"""The joint graph of forward and backward: while passes rewrite it, and when they are done."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from rkmate.graph.capture.capture import Capture, Source
from rkmate.graph.capture.operations import is_random, is_view
from rkmate.graph.passes.deferred import Deferred
from rkmate.torch_seam.nodes import copied as copied_node
from rkmate.torch_seam.nodes import is_backward


@dataclass(frozen=True)
class Joint:
    """The simplified joint graph, in one order: forward nodes, then backward nodes."""

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    outputs: tuple[fx.Node | None, ...]
    mutations: tuple[tuple[Source, fx.Node], ...]
    grads: tuple[tuple[Source, fx.Node], ...]
    constant: frozenset[fx.Node]
    """Nodes that depend on no trained value."""
    wanted: tuple[bool, ...]
    """Outputs whose gradient the backward takes."""
    nodes_before: int
    """Operations captured, views and aliases included."""
    linear_losses: tuple[str, ...] = ()
    """Weights of products, followed by a cross entropy, that can be computed a few rows at a time."""
    wide_mlps: tuple[str, ...] = ()
    """First weights of MLPs that can run a few rows at a time."""
    convolutions: tuple[str, ...] = ()
    """Weights of convolutions whose images could have their channels last, and have not."""
    decisions: frozenset[fx.Node] = frozenset()
    """Operations of the forward whose outcome must stand: they run once."""
    deferred: tuple[Deferred, ...] = ()
    """Outputs that are computed when they are read. Among `outputs`, None stands for them."""
    counters: tuple[tuple[Source, int], ...] = ()
    """What else the forward overwrites: integers, each with the number that is added to it."""

    @property
    def kept(self) -> tuple[fx.Node, ...]:
        """What deferred outputs are computed from: the forward leaves it."""
        return tuple(dict.fromkeys(n for d in self.deferred for n in d.kept.values()))

    def handed(self) -> set[fx.Node]:
        """Nodes whose value is handed to the caller."""
        return {n for n in self.outputs if n is not None} | {n for _, n in self.mutations} \
            | {n for _, n in self.grads} | set(self.kept)

    def written(self) -> set[Source]:
        """What the forward writes to."""
        return {s for s, _ in self.mutations} | {s for s, _ in self.counters}

    def results(self) -> set[fx.Node]:
        """Nodes whose value leaves the graph."""
        return self.handed() | self.additions()

    def additions(self) -> set[fx.Node]:
        """Operations that add to what the caller holds: their result is there."""
        return {n for n in self.graph.nodes if adds(n)}


@dataclass(frozen=True)
class Choices:
    """Rewritings that a graph may have and need not: each trades something for memory or time."""

    chunked_loss: bool = False
    """Whether linear losses are to be computed a few rows at a time."""
    tiled_mlps: bool = False
    """Whether wide MLPs are to run a few rows at a time."""
    grouped_loss: bool = False
    """Whether linear losses may be computed by groups of rows, whose logits a schedule may keep."""
    channels_last: bool = False
    """Whether convolutions are to have their channels last."""
    in_place: bool = False
    """Whether gradients of parameters are added to what the caller holds, and handed to nobody."""
    fused: bool = False
    """Whether groups of operations are to be compiled."""
    deferring: bool = False
    """Whether wide outputs without a gradient are to be left out of the step where that saves memory, and
    computed when they are read."""


@dataclass
class Rewriting:
    """The graph while it is rewritten, with the results that it has to keep: what passes work on."""

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    outputs: list[fx.Node | None]
    mutations: list[tuple[Source, fx.Node]]
    grads: list[tuple[Source, fx.Node]]
    wanted: tuple[bool, ...]
    """Outputs whose gradient the backward will take."""
    choices: Choices = Choices()
    nodes_before: int = field(init=False)
    """Operations at first."""
    constant: frozenset[fx.Node] = frozenset()
    """As `Joint.constant`, once it is known."""
    linear_losses: tuple[str, ...] = ()
    """As `Joint.linear_losses`, once they are known."""
    wide_mlps: tuple[str, ...] = ()
    """As `Joint.wide_mlps`, once they are known."""
    convolutions: tuple[str, ...] = ()
    """As `Joint.convolutions`, once they are known."""
    decisions: frozenset[fx.Node] = frozenset()
    """As `Joint.decisions`, once they are known."""
    deferred: list[Deferred] = field(default_factory=list)
    """As `Joint.deferred`."""
    counters: list[tuple[Source, int]] = field(default_factory=list)
    """As `Joint.counters`."""

    def __post_init__(self) -> None:
        self.nodes_before = sum(n.op == "call_function" for n in self.graph.nodes)

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let everything read `new` instead of `node`."""
        node.replace_all_uses_with(new)
        self.outputs = [new if n is node else n for n in self.outputs]
        self.mutations = [(s, new if n is node else n) for s, n in self.mutations]
        self.grads = [(s, new if n is node else n) for s, n in self.grads]
        for deferred in self.deferred:
            deferred.replace(node, new)

    def name(self, node: fx.Node) -> str:
        """The caller's name of a value, where it has one."""
        return str(self.sources[node].key) if node in self.sources else node.name

    def results(self) -> set[fx.Node]:
        """Nodes whose value leaves the graph."""
        return self.joint().results()

    def overwritten(self) -> set[fx.Node]:
        """What the forward writes to: buffers and inputs."""
        targets = {s for s, _ in self.mutations}
        return {n for n, s in self.sources.items() if s in targets}

    def leaves(self, node: fx.Node) -> bool:
        """Whether the caller gets the node's value, or a view of it."""
        todo = [node]
        while todo:
            n = todo.pop()
            if n in self.outputs:
                return True
            todo += [u for u in n.users if is_view(u)]
        return False

    def joint(self) -> Joint:
        """The graph as it stands."""
        return Joint(self.graph, self.sources, tuple(self.outputs), tuple(self.mutations),
                     tuple(self.grads), self.constant, self.wanted, self.nodes_before, self.linear_losses,
                     self.wide_mlps, self.convolutions, self.decisions, tuple(self.deferred),
                     tuple(self.counters))


def rewriting(capture: Capture, wanted: tuple[bool, ...], choices: Choices = Choices()) -> Rewriting:
    """A copy of the captured graph, to be rewritten."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in capture.graph.nodes:
        if node.op != "output":
            copies[node] = copied_node(graph, node, copies)
    return Rewriting(
        graph, {copies[n]: s for n, s in capture.sources.items()},
        [copies[n] if n is not None else None for n in capture.outputs],
        [(s, copies[n]) for s, n in capture.mutations], [(s, copies[n]) for s, n in capture.grads],
        wanted, choices)


def copied(work: Rewriting) -> Rewriting:
    """The same, to be rewritten apart."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in work.graph.nodes:
        copies[node] = copied_node(graph, node, copies)
    return Rewriting(
        graph, {copies[n]: s for n, s in work.sources.items()},
        [None if n is None else copies[n] for n in work.outputs],
        [(s, copies[n]) for s, n in work.mutations], [(s, copies[n]) for s, n in work.grads],
        work.wanted, work.choices)


def adds(node: fx.Node) -> bool:
    """Whether the operation has a side effect: it adds to a gradient that the caller holds."""
    return bool(node.meta.get("adds"))


def owner_of(node: fx.Node) -> fx.Node:
    """The value whose storage a view looks at."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


__all__ = ["Joint", "Rewriting", "adds", "is_backward", "is_random", "is_view", "owner_of", "rewriting"]
