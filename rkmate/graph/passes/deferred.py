"""An output that is computed when somebody reads it: the operations between what is kept and its values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from rkmate.graph.capture.capture import Source


@dataclass
class Deferred:
    """The recipe of one output, as a graph of its own."""

    output: int
    """Its number."""
    graph: fx.Graph
    sources: dict[fx.Node, Source]
    """What the placeholders of the graph are: what the caller holds, and of the kind ``kept`` what the
    forward leaves for it."""
    kept: dict[fx.Node, fx.Node]
    """Of these: the value of the joint graph."""
    result: fx.Node
    """The output in the graph."""
    origin: dict[fx.Node, fx.Node]
    """The node of the joint graph that each node is a copy of; it may be gone from there."""

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Another value of the joint graph has taken a kept one's place."""
        for mine, theirs in self.kept.items():
            if theirs is node:
                self.kept[mine] = new
