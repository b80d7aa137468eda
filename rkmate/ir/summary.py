"""A model's graph without the model: what a picture or a table needs, in JSON when saved.

No torch: a plan that was loaded from a file is drawn and explained from this alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from rkmate.ir.cd import CDGraph, CNode, Cost, DNode
from rkmate.ir.link import Link, read_link

CapturedKind = Literal["operation", "view", "dropped"]


@dataclass(frozen=True, slots=True)
class Computation:
    """What a C node computes, in terms of the user's model."""

    operation: str
    """The operator, without its namespace and overload: ``addmm``."""
    path: str
    """The module of the user's model that it comes from; empty for the model itself."""
    block: int
    """Block of the node; -1 for a value that is computed once at the start."""
    constant: bool = False
    """Depends on no trained value."""


@dataclass(frozen=True, slots=True)
class Captured:
    """An operation of the forward as it was captured, before simplification."""

    name: str
    operation: str
    path: str
    block: int
    kind: CapturedKind
    """``operation``: still there after simplification. ``view``: joined its owner's storage.
    ``dropped``: an alias, a copy that copied nothing, an assertion, or a value computed twice."""
    inputs: tuple[int, ...]
    """Captured operations that it reads."""


@dataclass(frozen=True)
class GraphSummary:
    """The graph that a plan's schedule runs over, with costs, and what people call its nodes. Indices as in
    the schedule."""

    cd: CDGraph
    """The graph as the simulator takes it."""
    computations: tuple[Computation, ...]
    """Description of each C node."""
    shapes: tuple[str, ...]
    """Form of the tensor that owns each D node: ``float32[8, 128, 64]``."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """Storages that the forward carries into block i (one entry more than there are blocks)."""
    captured: tuple[Captured, ...] = field(default=(), repr=False)

    @cached_property
    def block_c(self) -> Mapping[int, tuple[int, ...]]:
        """Per block, its computations: forward, then backward. Key -1: the hoisted constants."""
        result: dict[int, list[int]] = {}
        for i, c in enumerate(self.computations):
            result.setdefault(c.block, []).append(i)
        return {b: tuple(c) for b, c in sorted(result.items())}

    def with_link(self, link: Link) -> GraphSummary:
        """Return a copy whose data can be sent through another link."""
        return replace(self, cd=replace(self.cd, link=link))

    def content(self) -> dict[str, Any]:
        """Return the summary as a JSON object, without times and overheads, which the plan has."""
        cd = self.cd
        adding = [i for i, c in enumerate(cd.c) if c.adds]
        exchanging = [i for i, c in enumerate(cd.c) if c.exchanges]
        return {
            "computations": [[c.name, of.operation, of.path, of.block, list(c.inputs), list(c.outputs),
                              int(c.random), int(of.constant), list(c.donors)]
                             for c, of in zip(cd.c, self.computations, strict=True)],
            "storages": [[d.name, d.size, d.kind, shape] for d, shape in zip(cd.d, self.shapes, strict=True)],
            "loss": cd.loss, "outputs": list(cd.outputs),
            "output_grads": list(cd.output_grads), "input_grads": list(cd.input_grads),
            "exits": sorted([j, i] for j, i in cd.releases.items()), "held": list(cd.held),
            "decisions": [i for i, c in enumerate(cd.c) if c.decides],
            **({"additions": adding} if adding else {}),
            **({"collectives": exchanging} if exchanging else {}),
            **({"link": cd.link.content()} if cd.link else {}),
            **({"once": sorted(cd.once)} if cd.once else {}),
            **({"forgotten": sorted(cd.forgotten)} if cd.forgotten else {}),
            "reserve_at_loss": cd.reserve_at_loss, "cuts": [list(c) for c in self.cuts],
            "captured": [[c.name, c.operation, c.path, c.block, c.kind, list(c.inputs)]
                         for c in self.captured],
        }


def read_summary(content: Mapping[str, Any], costs: Sequence[Cost]) -> GraphSummary:
    """Inverse of `GraphSummary.content`. Raises `KeyError`, `TypeError` or `ValueError` if the content is
    invalid, and `GraphError` for a graph that breaks an invariant."""
    loss = int(content["loss"])
    decisions = set(map(int, content.get("decisions", ())))      # plans without: of graphs without
    additions = set(map(int, content.get("additions", ())))
    collectives = set(map(int, content.get("collectives", ())))
    nodes, computations = [], []
    for i, (row, cost) in enumerate(zip(content["computations"], costs, strict=True)):
        name, operation, path, block, inputs, outputs, random, constant, donors = row
        nodes.append(CNode(
            str(name), "forward" if i < loss else "backward", tuple(map(int, inputs)),
            tuple(map(int, outputs)), cost.time, cost.overhead, bool(random), tuple(map(int, donors)),
            cost.alternatives, i in decisions, i in additions, i in collectives))
        computations.append(Computation(str(operation), str(path), int(block), bool(constant)))
    cd = CDGraph(
        tuple(DNode(str(n), int(s), k) for n, s, k, _ in content["storages"]), tuple(nodes), loss, (),
        tuple(map(int, content["outputs"])), tuple(map(int, content["output_grads"])),
        tuple(map(int, content["input_grads"])), {int(j): int(i) for j, i in content["exits"]},
        read_link(content.get("link")), frozenset(map(int, content.get("once", ()))),
        frozenset(map(int, content.get("forgotten", ()))), tuple(map(int, content["held"])),
        int(content["reserve_at_loss"]))
    return GraphSummary(
        cd.verify(), tuple(computations), tuple(str(shape) for *_, shape in content["storages"]),
        tuple(tuple(map(int, c)) for c in content["cuts"]),
        tuple(Captured(str(n), str(o), str(p), int(b), k, tuple(map(int, r)))
              for n, o, p, b, k, r in content["captured"]))
