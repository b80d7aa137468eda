"""A model's graph without the model: what a picture or a table needs, in JSON when saved.

No torch: a plan that was loaded from a file is drawn and explained from this alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rkmate.ir.cd import CDGraph, CNode, Cost, DKind, DNode, Kernel, Phase
from rkmate.ir.link import Link, read_link

CapturedKind = Literal["operation", "view", "dropped"]


@dataclass(frozen=True, slots=True)
class Computation:
    """A C node."""

    name: str
    operation: str
    """The operator, without its namespace and overload: ``addmm``."""
    path: str
    """The module of the user's model that it comes from; empty for the model itself."""
    phase: Phase
    block: int
    """Block of the node; -1 for a value that is computed once at the start."""
    inputs: tuple[int, ...]
    """Storages that it reads."""
    outputs: tuple[int, ...]
    """Storages that it creates."""
    seconds: float
    overhead: int
    """Bytes of temporary memory."""
    random: bool = False
    constant: bool = False
    """Depends on no trained value."""
    donors: tuple[int, ...] = ()
    """Inputs that may take the output's place when they die here."""
    alternatives: tuple[Kernel, ...] = ()
    """Costs of the node's other kernels, if it has any."""
    decides: bool = False
    """Runs once: what it chooses must stand."""
    adds: bool = False
    """Runs once: it adds to a gradient that the caller holds."""
    exchanges: bool = False
    """Is a collective, which can run while other computations do."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A D node."""

    name: str
    size: int
    """Bytes."""
    kind: DKind
    shape: str
    """Form of the tensor that owns it: ``float32[8, 128, 64]``."""


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
    """The graph that a plan's schedule runs over, with costs. Indices as in the schedule."""

    computations: tuple[Computation, ...]
    storages: tuple[Storage, ...]
    loss: int
    """Index of the first backward computation."""
    outputs: tuple[int, ...]
    output_grads: tuple[int, ...]
    input_grads: tuple[int, ...]
    releases: Mapping[int, int]
    """Parameter gradient -> computation after which it leaves memory."""
    pinned: tuple[int, ...]
    """Storages that the user holds."""
    reserve_at_loss: int
    """Bytes left for a loss that the caller computes."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """Storages that the forward carries into block i (one entry more than there are blocks)."""
    captured: tuple[Captured, ...] = field(default=(), repr=False)
    link: Link | None = None
    """Connection to the place where data can be sent meanwhile; None: nowhere."""

    @cached_property
    def cd(self) -> CDGraph:
        """The graph as the simulator takes it."""
        return CDGraph(
            tuple(DNode(s.name, s.size, s.kind) for s in self.storages),
            tuple(CNode(c.name, c.phase, c.inputs, c.outputs, c.seconds, c.overhead, c.random,
                        c.donors, c.alternatives, c.decides, c.adds, c.exchanges)
                  for c in self.computations),
            self.loss, (), self.outputs, self.output_grads, self.input_grads, self.releases, self.link)

    @cached_property
    def block_c(self) -> Mapping[int, tuple[int, ...]]:
        """Per block, its computations: forward, then backward. Key -1: the hoisted constants."""
        result: dict[int, list[int]] = {}
        for i, c in enumerate(self.computations):
            result.setdefault(c.block, []).append(i)
        return {b: tuple(c) for b, c in sorted(result.items())}

    @cached_property
    def maker(self) -> tuple[int | None, ...]:
        """The computation that creates each storage; None for gradients that arrive."""
        return self.cd.producer

    def content(self) -> dict[str, Any]:
        """Return the summary as a JSON object, without times and overheads, which the plan has."""
        adding = [i for i, c in enumerate(self.computations) if c.adds]
        exchanging = [i for i, c in enumerate(self.computations) if c.exchanges]
        return {
            "computations": [[c.name, c.operation, c.path, c.block, list(c.inputs), list(c.outputs),
                              int(c.random), int(c.constant), list(c.donors)]
                             for c in self.computations],
            "storages": [[s.name, s.size, s.kind, s.shape] for s in self.storages],
            "loss": self.loss, "outputs": list(self.outputs),
            "output_grads": list(self.output_grads), "input_grads": list(self.input_grads),
            "exits": sorted([j, i] for j, i in self.releases.items()), "held": list(self.pinned),
            "decisions": [i for i, c in enumerate(self.computations) if c.decides],
            **({"additions": adding} if adding else {}),
            **({"collectives": exchanging} if exchanging else {}),
            **({"link": self.link.content()} if self.link else {}),
            "reserve_at_loss": self.reserve_at_loss, "cuts": [list(c) for c in self.cuts],
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
    computations = []
    for i, (row, cost) in enumerate(zip(content["computations"], costs, strict=True)):
        name, operation, path, block, inputs, outputs, random, constant, places = row
        computations.append(Computation(
            str(name), str(operation), str(path), "forward" if i < loss else "backward", int(block),
            tuple(map(int, inputs)), tuple(map(int, outputs)), cost.time, cost.overhead, bool(random),
            bool(constant), tuple(map(int, places)), cost.alternatives, i in decisions, i in additions,
            i in collectives))
    result = GraphSummary(
        tuple(computations),
        tuple(Storage(str(n), int(s), k, str(shape)) for n, s, k, shape in content["storages"]),
        loss, tuple(map(int, content["outputs"])), tuple(map(int, content["output_grads"])),
        tuple(map(int, content["input_grads"])), {int(j): int(i) for j, i in content["exits"]},
        tuple(map(int, content["held"])), int(content["reserve_at_loss"]),
        tuple(tuple(map(int, c)) for c in content["cuts"]),
        tuple(Captured(str(n), str(o), str(p), int(b), k, tuple(map(int, r)))
              for n, o, p, b, k, r in content["captured"]),
        read_link(content.get("link")))
    result.cd.verify()
    return result
