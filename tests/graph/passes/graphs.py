"""Joint graphs made by hand, operation by operation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rkmate.graph.capture.captured import Source, SourceKind
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.table import REWRITES, rewrite

aten = torch.ops.aten


class Made:
    """A graph that grows by calls, each with the value that torch says."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.sources: dict[fx.Node, Source] = {}
        self._mode = FakeTensorMode()

    def source(self, kind: SourceKind, key: str | int, *shape: int,
               dtype: torch.dtype = torch.float32) -> fx.Node:
        """A parameter, a buffer, an input, a constant or the gradient of an output."""
        node = self.graph.placeholder(f"{kind}_{key}")
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.sources[node] = Source(kind, key)
        return node

    def call(self, target: Any, *args: Any, backward: bool = False, **kwargs: Any) -> fx.Node:
        """An operation."""
        node = self.graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = target(*given, **named)
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        return node

    def item(self, node: fx.Node, place: int, *, backward: bool = False) -> fx.Node:
        """One of several results."""
        return self.call(operator.getitem, node, place, backward=backward)

    def work(self, outputs: Sequence[fx.Node | None] = (), grads: Sequence[tuple[fx.Node, fx.Node]] = (),
             mutations: Sequence[tuple[fx.Node, fx.Node]] = (), wanted: Sequence[bool] | None = None,
             **choices: bool) -> Joint:
        """What passes take. `choices`: as of `Joint`, with underscores. `grads` and `mutations` are pairs of
        a source and its gradient or value."""
        return Joint(self.graph, self.sources, tuple(outputs),
                     tuple((self.sources[s], n) for s, n in mutations),
                     tuple((self.sources[s], n) for s, n in grads), tuple(wanted or [True] * len(outputs)),
                     frozenset(name.replace("_", "-") for name, chosen in choices.items() if chosen))


def run(name: str, work: Joint) -> Joint:
    """One pass of the table; what it leaves is verified, as far as what it got was in order."""
    rewrite(work, [p for p in REWRITES if p.name == name], verify=True)
    return work


def targets(work: Joint) -> list[Any]:
    """The operations that are there, in order."""
    return [n.target for n in work.graph.nodes if n.op == "call_function"]
