"""Lower the simplified joint graph to the CD graph and the statements of its nodes.

Views join their owner's storage (Rockmate, appendix A.3); what an operation saves for its backward
is an output of its own (the paper's phantoms, appendix A.6).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.errors import CaptureError
from rkmate.graph.capture.captured import Source
from rkmate.graph.ops.collectives import is_collective
from rkmate.graph.ops.properties import is_random, is_view
from rkmate.graph.passes.in_place import InPlace, in_place_ways
from rkmate.graph.passes.joint import Joint, adds
from rkmate.graph.passes.tiles.tiled import Alternative, alternatives
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.schedule import Compute, Loss, Schedule, Start
from rkmate.torch_seam.nodes import VALUE, is_backward


@dataclass(frozen=True)
class Program:
    """A CD graph without costs, and the torch operations behind its nodes."""

    joint: Joint
    cd: CDGraph
    operation: tuple[fx.Node, ...]
    """The torch operation of each C node."""
    owner: tuple[fx.Node, ...]
    """The value that holds each D node's storage (a `getitem` where the operation has several
    outputs, a placeholder for the gradient of an output)."""
    position: tuple[int | None, ...]
    """The index of each D node among the outputs of its operation; None for a single output."""
    storage: dict[fx.Node, int | Source]
    """The place of each value: a D node, or a tensor of the caller."""
    param_grads: tuple[tuple[Source, fx.Node], ...]
    """Gradients handed to autograd, in the order in which they are made; a parameter used in
    several places has several."""
    input_grads: tuple[tuple[Source, fx.Node], ...]
    """Gradients of the module's inputs."""
    constant: frozenset[int]
    """C nodes that depend on no trained value."""
    overwritten: tuple[tuple[Source, fx.Node], ...]
    """Buffers and inputs to write after the forward, with their new values."""
    pinned: tuple[int, ...]
    """D nodes that stay: the module's outputs live in them, or they are copies and choices that are made
    once."""
    in_place: Mapping[fx.Node, Mapping[int, InPlace]]
    """For each operation with donors, how its result is written over each of them."""
    alternatives: Mapping[fx.Node, tuple[Alternative, ...]]
    """The other kernels of operations, where there are any."""
    views: frozenset[fx.Node] = frozenset()
    """The operations whose value shares its input's storage."""

    def d_of(self, node: fx.Node) -> int | None:
        """Return the D node that a value lives in; None for what the caller holds."""
        where = self.storage[node]
        return where if isinstance(where, int) else None

    def only_returned(self, schedule: Schedule) -> frozenset[int]:
        """Return the D nodes of outputs that a schedule does not read after its forward: a step hands them
        out and forgets them."""
        read = {self.d_of(n) for _, n in (*self.param_grads, *self.input_grads)}
        for step in schedule.steps[schedule.steps.index(Loss()) + 1:]:
            assert not isinstance(step, Loss)
            read.update(self.cd.c[step.c].inputs if isinstance(step, Compute | Start) else (step.d,))
        outputs = {self.d_of(n) for n in self.joint.outputs if n is not None}
        return frozenset(j for j in self.pinned if j in outputs and j not in read)

    def reads(self, c: int) -> Iterator[fx.Node]:
        """Return the values that a C node's operation takes."""
        return iter(self.operation[c].all_input_nodes)


def storage_bytes(value: Any) -> int:
    """Return bytes that the allocator hands out for the storage behind a (fake) tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    size = int(value.untyped_storage().nbytes())
    return devices.of(value).storage_bytes(size)


def _storage_of_result(node: fx.Node) -> int:
    """Return the bytes behind an operation's result. A functional copy over a part of a tensor has the whole
    storage of that tensor, which another tensor may have replaced since the trace."""
    size = storage_bytes(node.meta[VALUE])
    if node.target is torch.ops.aten.copy.default and isinstance(node.args[0], fx.Node):
        return max(size, storage_bytes(node.args[0].meta[VALUE]))
    return size


def lower(joint: Joint) -> Program:
    """Build the program of a joint graph. Raises `CaptureError` for operations without a meaning."""
    builder = _Builder(joint)
    nodes = [n for n in joint.graph.nodes if n.op == "call_function"]
    forward = [n for n in nodes if not is_backward(n)]
    backward = [n for n in nodes if is_backward(n)]
    for node in forward:
        builder.add(node, "forward")
    loss = len(builder.c)
    for node in backward:
        builder.add(node, "backward")
    return builder.finish(loss)


class _Builder:
    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.c: list[CNode] = []
        self.d: list[DNode] = []
        self.operation: list[fx.Node] = []
        self.owner: list[fx.Node] = []
        self.position: list[int | None] = []
        self.storage: dict[fx.Node, int | Source] = {}
        self.tangents: list[int] = []
        self.views: list[fx.Node] = []
        self.in_place: dict[fx.Node, dict[int, InPlace]] = {}
        self.results = joint.handed()
        for node, source in joint.sources.items():
            if source.kind == "tangent":
                if (node.users or node in self.results) and joint.wanted[int(source.key)]:
                    value = node.meta[VALUE]
                    size = value.numel() * value.element_size()
                    self.storage[node] = self._d(node, None, f"grad_output_{source.key}", size, "grad")
                    self.tangents.append(self.storage[node])  # type: ignore[arg-type]
            else:
                self.storage[node] = source

    def _d(self, owner: fx.Node, position: int | None, name: str, size: int, kind: Any) -> int:
        self.d.append(DNode(name, size, kind))
        self.owner.append(owner)
        self.position.append(position)
        return len(self.d) - 1

    def add(self, node: fx.Node, phase: Any) -> None:
        if is_view(node):
            self.views.append(node)
            base = node.args[0]
            while isinstance(base, fx.Node) and base not in self.storage:
                base = base.args[0]
            if not isinstance(base, fx.Node):
                raise CaptureError(f"{node.name}: a view of no tensor")
            self.storage[node] = self.storage[base]
            return
        if node.target is operator.getitem:
            return                               # made together with its operation
        kind = "data" if phase == "forward" else "grad"
        value = node.meta.get(VALUE)
        outputs: list[int] = []
        if adds(node) and not isinstance(value, (tuple, list)):
            pass                                 # its result is in what the caller holds
        elif isinstance(value, (tuple, list)):
            for user in sorted(node.users, key=lambda u: u.args[1]):  # type: ignore[arg-type, return-value]
                if user.target is not operator.getitem:
                    raise CaptureError(f"{node.target} returns several tensors that are used as one "
                                       "list, which cannot be planned: use them one by one. rkmate.dtr "
                                       "runs such models")
                i = int(user.args[1])  # type: ignore[arg-type]
                if not user.users and user not in self.results:
                    continue
                same = [o for o in outputs if self.position[o] == i]
                if same:
                    self.storage[user] = same[0]
                    continue
                out = self._d(user, i, f"{node.name}.{i}", storage_bytes(value[i]), kind)
                self.storage[user] = out
                outputs.append(out)
        elif isinstance(value, torch.Tensor):
            out = self._d(node, None, node.name, _storage_of_result(node), kind)
            self.storage[node] = out
            outputs.append(out)
        else:
            raise CaptureError(f"{node.target} returns {type(value).__name__}: only operations on "
                               "tensors can be planned; the value depends on data. rkmate.dtr runs "
                               "such models")
        inputs = dict.fromkeys(self.storage[n] for n in node.all_input_nodes)
        ways: dict[int, InPlace] = {}
        for way in in_place_ways(node, self.storage.__getitem__):
            donor = self.storage[node.args[way.argument]]  # type: ignore[index]
            first = bool(outputs) and not self.position[outputs[0]]     # that takes the donor's memory
            if first and isinstance(donor, int) and donor not in self.tangents:
                ways.setdefault(donor, way)
        if ways:
            self.in_place[node] = ways
        self.c.append(CNode(node.name, phase, tuple(i for i in inputs if isinstance(i, int)),
                            tuple(outputs), random=is_random(node), donors=tuple(ways),
                            decides=node in self.joint.decisions, adds=adds(node),
                            exchanges=is_collective(node.target)))
        self.operation.append(node)

    def finish(self, loss: int) -> Program:
        joint = self.joint
        producer = {j: i for i, c in enumerate(self.c) for j in c.outputs}
        param_grads: list[tuple[Source, fx.Node]] = []
        input_grads: list[tuple[Source, fx.Node]] = []
        for source, node in joint.grads:
            if source.kind == "input":
                input_grads.append((source, node))
            else:
                param_grads.append((source, node))

        def made_at(node: fx.Node) -> int:
            where = self.storage[node]
            return producer.get(where, -1) if isinstance(where, int) else -1

        param_grads.sort(key=lambda g: made_at(g[1]))
        read_in_forward = {j for c in self.c[:loss] for j in c.inputs}
        outputs = [n for n in (*joint.outputs, *joint.kept) if n is not None]
        # A copy of what the forward overwrites can be made only once: it stays, as outputs do.
        overwritten = joint.overwritten()
        outputs += [n for n in self.operation if n.target is torch.ops.aten.clone.default
                    and n.args[0] in overwritten]
        pinned = dict.fromkeys(w for n in outputs if isinstance(w := self.storage[n], int))
        pinned.update(dict.fromkeys(j for c in self.c if c.decides for j in c.outputs))
        written = dict.fromkeys(w for _, n in joint.mutations if isinstance(w := self.storage[n], int))
        for j, d in enumerate(self.d):
            if d.kind == "data" and j not in read_in_forward and j not in pinned and j not in written:
                self.d[j] = DNode(d.name, d.size, "saved")
        last = dict.fromkeys(w for _, n in input_grads if isinstance(w := self.storage[n], int))
        # What is handed to autograd is nobody's to overwrite.
        handed = {self.storage[n] for _, n in param_grads}
        self.c = [replace(c, donors=tuple(j for j in c.donors if j not in handed))
                  if any(j in handed for j in c.donors) else c for c in self.c]
        graph = CDGraph(tuple(self.d), tuple(self.c), loss, (), tuple({**pinned, **written}),
                        tuple(self.tangents), tuple(last))
        constant = frozenset(i for i, n in enumerate(self.operation) if n in joint.constant)
        return Program(joint, graph.verify(), tuple(self.operation), tuple(self.owner),
                       tuple(self.position), self.storage, tuple(param_grads), tuple(input_grads),
                       constant, joint.mutations, tuple(pinned), self.in_place,
                       {n: others for n in self.operation if (others := alternatives(n))},
                       frozenset(self.views))
