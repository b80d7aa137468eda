"""A captured step: the joint graph, where its inputs come from, and what its outputs are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rkmate.errors import CaptureError
from rkmate.graph.capture.answers import Kinds
from rkmate.graph.capture.effects import Effects
from rkmate.graph.capture.recipe import Recipe
from rkmate.graph.capture.refusals import OWN_GENERATOR, place_in
from rkmate.graph.capture.state import Assigned, resizes
from rkmate.graph.capture.structure import LOCAL, Structure, piece_name
from rkmate.graph.capture.values import Values
from rkmate.torch_seam.dtensor import local_names
from rkmate.torch_seam.modules import buffers_by_path, parameters_by_path
from rkmate.torch_seam.nodes import VALUE, descriptor
from rkmate.torch_seam.patches.numerics import CHECKS_BY_VALUE, ChecksByValue
from rkmate.torch_seam.tensors import storage_id
from rkmate.torch_seam.trace import Role, role_of

SourceKind = Literal["param", "buffer", "input", "constant", "tangent", "kept", "grad"]


@dataclass(frozen=True)
class Source:
    """Origin of a placeholder's value when the graph runs."""

    kind: SourceKind
    key: str | int
    """Parameter, buffer, a piece of one (`pieces`), or constant: its name.
    Input: index of the tensor among the arguments.
    Tangent: index of the output whose gradient it is.
    Kept: name of a value that the forward leaves for an output that is computed later.
    Grad: name of the parameter whose ``.grad`` it is; no capture has one, the pass that adds to it does."""
    repeats: int | None = None
    """The input that this one is once more (`Capture.repeats`)."""


@dataclass(frozen=True)
class Capture:
    """A module's training step on one signature, without the loss outside."""

    graph: torch.fx.Graph
    sources: dict[torch.fx.Node, Source]
    outputs: tuple[torch.fx.Node | None, ...]
    """The module's output tensors."""
    mutations: tuple[tuple[Source, torch.fx.Node], ...]
    """Buffers and inputs that the forward writes, with the node of the new value."""
    grads: tuple[tuple[Source, torch.fx.Node], ...]
    """Gradients of parameters and inputs."""
    inputs: Structure
    result: Structure
    constants: dict[str, torch.Tensor]
    """Tensors that the forward creates from Python values (lifted by the tracer)."""
    differentiable: tuple[bool, ...]
    """Whether each output carries a gradient."""
    assigned: tuple[Assigned, ...] = ()
    """Attributes that a first forward has left changed, and later ones do not assign; a trace from either
    value is the same."""
    effects: Effects = Effects()
    """Changes that the forward leaves behind. Their tensors are among the outputs, after the result's."""
    recipe: Recipe | None = None
    """Computes the graph's further inputs, which follow the arguments' tensors in number; None if the forward
    needs no values."""
    looked: Kinds = ()
    """Arguments whose values a library has looked at, with the kinds that the graph is for."""
    repeats: tuple[int, ...] = ()
    """Inputs that a planned step gets once more, with the numbers after all others: the gradient of each is
    handed out as the terms of a sum, which autograd adds up with those of other users."""
    completed: bool = False
    """Whether a first call has made what later ones find, before the capture (`complete`)."""
    program: str = ""
    """The text of the exported forward, where the whole graph follows from it (`_text_of_program`), for a
    second trace to compare with; empty otherwise, and once the capture is complete."""

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the graph's inputs, in order. `tensors`: those among the arguments."""
        return [*tensors, *(() if self.recipe is None else self.recipe.run(tensors))]


# -- Reading a joint graph -------------------------------------------------------------------------

def read(module: torch.fx.GraphModule, model: nn.Module, program: nn.Module, inputs: Structure,
         structure: Structure, values: Values | None, count: int) -> Capture:
    """Return the captured step of a joint graph. Raises `CaptureError`.

    `program`: the exported forward, whose buffers hold the constants; `inputs`, `structure`: around the
    tensors of the arguments and of the result; `values`: those of inputs that the forward has asked for;
    `count`: of the outputs.
    """
    lifted = [getattr(module, n.target) for n in module.graph.nodes if n.op == "get_attr"]
    held = dict(program.named_buffers(remove_duplicate=False))
    given, recipe = ({}, None) if values is None else values.found_in(
        t for t in (*held.values(), *lifted) if isinstance(t, torch.Tensor))
    found = _Sources(model, held, {key: inputs.count + k for key, k in given.items()})
    sources = {node: source for node in module.graph.nodes
               if (source := found.of_node(node, module)) is not None}
    outputs, mutations, grads = _outputs(module.graph, sources, found, count)
    changing = set() if values is None else values.numbers & {str(s.key) for s, _ in mutations}
    if changing:
        raise CaptureError(f"{type(model).__name__}: the forward reads a number from the buffer "
                           f"{min(changing)!r}, which it changes, too: each number would take a plan of its "
                           "own. Compute with the buffer instead, or decide outside of the forward")
    tangents = {s.key for s in sources.values() if s.kind == "tangent"}
    return Capture(module.graph, sources, tuple(outputs), tuple(mutations), tuple(grads), inputs,
                   structure, found.constants, tuple(i in tangents for i in range(count)), recipe=recipe)


class _Sources:
    """The sources of a joint graph's inputs, by the roles that AOTAutograd gives them. Collects the tensors
    of those that are constants."""

    def __init__(self, model: nn.Module, held: dict[str, torch.Tensor], given: dict[int, int]) -> None:
        """`held`: buffers of the exported forward; `given`: the number of the input that a storage is."""
        self.model, self._held, self._given = model, held, given
        self.constants: dict[str, torch.Tensor] = {}
        self._names = {name for name, _ in parameters_by_path(model)}
        self._buffers = {name for name, _ in buffers_by_path(model)}

    def of_node(self, node: torch.fx.Node, module: torch.fx.GraphModule) -> Source | None:
        """Return the source of a placeholder or constant; None for other nodes."""
        if node.op == "placeholder":
            return self.of_role(role_of(descriptor(node)), descriptor(node))
        return self._of_constant(node, getattr(module, str(node.target))) if node.op == "get_attr" else None

    def of_role(self, role: Role, said: object) -> Source:
        """Return the source with a role. `said`: the descriptor that the role was read from."""
        if role.kind in ("parameter", "buffer"):
            return self._of_name(role.name)
        if role.kind == "piece" and role.of is not None:
            of = self.of_role(role.of, said)
            if of.kind in ("param", "buffer"):
                return Source(of.kind, piece_name(str(of.key), role.name))
        if role.kind in ("input", "tangent"):
            return Source("input" if role.kind == "input" else "tangent", role.index)
        if role.kind == "other" and role.of is not None and role.of.kind == "parameter":
            raise CaptureError(f"{type(self.model).__name__}: the forward changes the parameter "
                               f"{role.of.name.removeprefix('model.')!r} in place, which cannot be "
                               "planned. If only the first call does so (it sets first values by the first "
                               "batch), call the model once before you plan it; otherwise, change the "
                               "parameter outside of the forward, or keep it in a buffer")
        if role.kind == "token":
            raise ChecksByValue(f"{type(self.model).__name__} uses an operation that {CHECKS_BY_VALUE}")
        raise CaptureError(f"{type(self.model).__name__}: the captured graph has an input of a kind that "
                           f"is not supported: {said}")

    def _of_name(self, path: str) -> Source:
        """Return the source of a parameter or buffer of the exported forward."""
        name = path.removeprefix("model.")
        if name in local_names():
            return Source("param", piece_name(name, LOCAL))
        if name in self._names:
            return Source("param", name)
        if name in self._buffers:
            return Source("buffer", name)
        if self._given and storage_id(self._held[path]) in self._given:
            return Source("input", self._given[storage_id(self._held[path])])
        self.constants[path] = self._held[path].detach()
        return Source("constant", path)

    def _of_constant(self, node: torch.fx.Node, value: Any) -> Source:
        if isinstance(value, torch.Generator):
            place = place_in("\n".join(user.stack_trace or "" for user in node.users))
            raise CaptureError(f"{type(self.model).__name__} cannot be captured{place}: it {OWN_GENERATOR}")
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"{type(self.model).__name__} uses the higher-order operation "
                               f"{node.target}, which cannot be planned statically; "
                               "rkmate.dtr runs such models")
        if self._given and storage_id(value) in self._given:
            return Source("input", self._given[storage_id(value)])
        self.constants[str(node.target)] = value.detach()
        return Source("constant", str(node.target))


_Pairs = list[tuple[Source, torch.fx.Node]]


def _outputs(graph: torch.fx.Graph, sources: dict[torch.fx.Node, Source], found: _Sources, count: int
             ) -> tuple[list[torch.fx.Node | None], _Pairs, _Pairs]:
    """Return the module's outputs, the new values of what the forward writes, and the gradients."""
    model = type(found.model).__name__
    shapes = {s: n.meta[VALUE].shape for n, s in sources.items() if VALUE in n.meta}
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    outputs: list[torch.fx.Node | None] = [None] * count
    mutations: _Pairs = []
    grads: _Pairs = []
    for node, said in zip(output.args[0], descriptor(output), strict=True):
        if said is None or node is None:
            continue
        role = role_of(said)
        if role.kind == "output":
            outputs[role.index] = node
        elif role.kind == "mutation" and role.of is not None:
            target, shape = found.of_role(role.of, said), node.meta[VALUE].shape
            if target.kind == "buffer" and shape != shapes.get(target, shape):
                raise CaptureError(resizes(found.model, str(target.key)))
            mutations.append((target, node))
        elif role.kind == "gradient" and role.of is not None:
            of = found.of_role(role.of, said)
            if node.meta[VALUE].layout is not torch.strided:
                raise CaptureError(f"{model}: the gradient of {of.key} is sparse, and only dense gradients "
                                   "can be planned (nn.Embedding: sparse=False)")
            grads.append((of, node))
        else:
            raise CaptureError(f"{model}: the captured graph has an output of a kind that is not supported: "
                               f"{said}")
    return outputs, mutations, grads
