"""Capture: the joint forward and backward graph of a module, as ATen operations.

The only file that uses private names of torch. Tested with torch 2.13; written for 2.11 to 2.13.
`torch.export` first (it tells libraries that they are being compiled, so that data-dependent mask
checks take the traceable path), then AOTAutograd's joint graph with descriptors.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._functorch._aot_autograd import descriptors as D
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode

from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.structure import Structure, take_apart, tensors_in

SourceKind = Literal["param", "buffer", "input", "constant", "tangent"]


@dataclass(frozen=True)
class Source:
    """Where a placeholder's value comes from when the graph runs."""

    kind: SourceKind
    key: str | int
    """Parameter, buffer or constant: its name. Input: index of the tensor among the arguments.
    Tangent: index of the output whose gradient it is."""


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
    """Which outputs carry a gradient."""


class _Found:
    """What the traced forward returned; opaque to the tracer, which restores module attributes."""

    structure: Structure | None = None


class _Flat(nn.Module):
    """The module with a flat list of tensors in and out; non-tensors are baked in."""

    def __init__(self, model: nn.Module, inputs: Structure) -> None:
        super().__init__()
        self.model = model
        self.found = _Found()
        self._inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self._inputs.fill(list(tensors))
        out = self.model(*args, **kwargs)
        flat, structure = take_apart(out, result=True)
        self.found.structure = structure
        # A copy of each output keeps the graph's outputs free of aliases (of inputs, of each
        # other); simplification drops the copies again.
        return [t.clone() for t in flat]


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """The joint graph of one training step. Raises `CaptureError`, `ArgumentError`.

    The model is left as it was: parameters, buffers, gradients, train flags, random state and
    Python attributes.
    """
    tensors, inputs = take_apart((args, kwargs), result=False)
    flat = _Flat(model, inputs)
    flat.training = model.training
    before = _python_state(model)
    with _unchanged_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(flat, tuple(tensors), strict=False)
            program = exported.module()
            structure = flat.found.structure
            assert structure is not None
            with contextlib.ExitStack() as stack:
                joint = aot_export_joint_with_descriptors(stack, program, tuple(tensors))
                module = joint.graph_module
        except (ArgumentError, CaptureError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise _capture_error(model, args, kwargs, error) from error
        finally:
            changed = _restore_python_state(model, before)
    if changed:
        raise CaptureError(
            f"{type(model).__name__}: the forward assigns {', '.join(changed[:5])}; a captured step "
            "would not repeat that. Keep such state in a buffer (register_buffer), or return it.")
    return _read(module, model, program, inputs, structure)


def _read(module: torch.fx.GraphModule, model: nn.Module, program: nn.Module,
          inputs: Structure, structure: Structure) -> Capture:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    held = dict(program.named_buffers(remove_duplicate=False))
    sources: dict[torch.fx.Node, Source] = {}
    constants: dict[str, torch.Tensor] = {}

    def source(desc: Any) -> Source:
        if isinstance(desc, (D.ParamAOTInput, D.BufferAOTInput)):
            name = desc.target.removeprefix("model.")
            if name in names:
                return Source("param", name)
            if name in buffers:
                return Source("buffer", name)
            constants[desc.target] = held[desc.target].detach()
            return Source("constant", desc.target)
        if isinstance(desc, D.PlainAOTInput):
            return Source("input", desc.idx)
        if isinstance(desc, D.TangentAOTInput) and isinstance(desc.output, D.PlainAOTOutput):
            return Source("tangent", desc.output.idx)
        raise CaptureError(f"{type(model).__name__}: the captured graph has an input of a kind that "
                           f"is not supported: {desc}")

    for node in module.graph.nodes:
        if node.op == "placeholder":
            sources[node] = source(node.meta["desc"])
        elif node.op == "get_attr":
            value = getattr(module, node.target)
            if not isinstance(value, torch.Tensor):
                raise CaptureError(f"{type(model).__name__} uses the higher-order operation "
                                   f"{node.target}, which cannot be planned statically; "
                                   "rkmate.dtr runs such models")
            constants[node.target] = value.detach()
            sources[node] = Source("constant", node.target)
    output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    outputs: list[torch.fx.Node | None] = [None] * structure.count
    mutations: list[tuple[Source, torch.fx.Node]] = []
    grads: list[tuple[Source, torch.fx.Node]] = []
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        if desc is None or node is None:
            continue
        if isinstance(desc, D.PlainAOTOutput):
            outputs[desc.idx] = node
        elif isinstance(desc, D.InputMutationAOTOutput):
            mutations.append((source(desc.mutated_input), node))
        elif isinstance(desc, D.GradAOTOutput):
            grads.append((source(desc.grad_of), node))
        else:
            raise CaptureError(f"{type(model).__name__}: the captured graph has an output of a kind "
                               f"that is not supported: {desc}")
    tangents = {s.key for s in sources.values() if s.kind == "tangent"}
    return Capture(module.graph, sources, tuple(outputs), tuple(mutations), tuple(grads), inputs,
                   structure, constants, tuple(i in tangents for i in range(structure.count)))


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """The mode that the graph's fake tensors belong to."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode  # type: ignore[no-any-return]
    raise CaptureError("the model has no tensors")


@contextlib.contextmanager
def _unchanged_random_state() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


_MODULE_FIELDS = {"_parameters", "_buffers", "_modules"}
_MISSING = object()


def _python_state(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, Any], list[dict[str, Any]]]]:
    return [(name, m, dict(m.__dict__), [dict(m.__dict__[f]) for f in sorted(_MODULE_FIELDS)])
            for name, m in model.named_modules()]


def _restore_python_state(
        model: nn.Module,
        before: list[tuple[str, nn.Module, dict[str, Any], list[dict[str, Any]]]]) -> list[str]:
    """Put back every attribute of every submodule; returns the names of those that had changed."""
    changed: list[str] = []
    for name, m, attributes, registries in before:
        for field, content in zip(sorted(_MODULE_FIELDS), registries, strict=True):
            now = attributes[field]
            if {k: id(v) for k, v in now.items()} != {k: id(v) for k, v in content.items()}:
                now.clear()
                now.update(content)
        for k in {*m.__dict__, *attributes}:
            old, new = attributes.get(k, _MISSING), m.__dict__.get(k, _MISSING)
            if old is new:
                continue
            # Numbers and flags that a forward keeps are harmless; new tensors are lost state.
            known = {id(t) for t in tensors_in(old)}
            if any(id(t) not in known for t in tensors_in(new)):
                changed.append(f"{name + '.' if name else ''}{k}")
            if old is _MISSING:
                del m.__dict__[k]
            else:
                m.__dict__[k] = old
    return changed


def _capture_error(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                   error: Exception) -> Exception:
    """Name the operation and the line of the model's own source."""
    import inspect

    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as mismatch:
        return ArgumentError(f"the sample inputs do not fit {type(model).__name__}.forward: {mismatch}")
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if "/torch/" not in f.filename.replace("\\", "/") and __file__ != f.filename
              and not f.filename.startswith("<")]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    data_dependent = "data-dependent" in str(error) or "DataDependent" in type(error).__name__ \
        or "Could not guard" in str(error) or "aten._local_scalar_dense" in str(error)
    hint = (" The branch depends on the value of a tensor, so no static plan exists: "
            "rkmate.dtr runs such models." if data_dependent else "")
    return CaptureError(f"{type(model).__name__} cannot be captured{where}: {reason}{hint}")
