"""A plan's source, compiled, on a model's own parameters and buffers."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rkmate.codegen.emit import Generated
from rkmate.codegen.runtime import Call, Environment, connect
from rkmate.graph.capture import Capture
from rkmate.graph.partition import Partition

_numbers = iter(range(1 << 62))


@dataclass(frozen=True)
class TensorSlot:
    """Where a module keeps a tensor: looked up at each call, so that ``model.to()`` is followed."""

    registry: Mapping[str, torch.Tensor | None]
    name: str

    def get(self) -> torch.Tensor:
        """The tensor that stands there now."""
        value = self.registry[self.name]
        assert value is not None
        return value


class Compiled:
    """Runs the generated source; one instance per signature of a wrapped module."""

    def __init__(self, model: nn.Module, capture: Capture, partition: Partition,
                 generated: Generated, device: torch.device) -> None:
        self.capture = capture
        self.generated = generated
        self.device = device
        self.result = capture.result
        self.wanted = partition.program.joint.wanted
        filename = f"<rkmate plan {next(_numbers)}>"
        namespace: dict[str, Any] = {}
        exec(compile(generated.text, filename, "exec"), namespace)
        # Tracebacks and debuggers show the generated lines.
        linecache.cache[filename] = (len(generated.text), None, generated.text.splitlines(True), filename)
        self._forward = namespace["forward"]
        self._backward = [namespace[s.function] for s in generated.segments]
        self._slots: dict[str, TensorSlot] = {}
        self._inputs: dict[str, int] = {}
        self._fixed: dict[str, torch.Tensor] = {}
        for key in dict.fromkeys([*generated.sources, *generated.overwritten]):
            kind, _, name = key.partition(":")
            if kind == "input":
                self._inputs[key] = int(name)
            elif kind == "constant":
                self._fixed[key] = capture.constants[name]
            else:
                self._slots[key] = slot(model, name, kind)
        self._params = [[slot(model, p, "param") for p in s.params] for s in generated.segments]
        self._non_differentiable = [i for i, d in enumerate(capture.differentiable) if not d]
        self._tangents = [(i, f"grad_output_{i}") for i, w in enumerate(self.wanted) if w]
        meta = [n.meta["val"] if n is not None else None for n in partition.program.joint.outputs]
        self._meta = [(tuple(m.shape), m.dtype, tuple(m.stride())) if m is not None else None
                      for m in meta]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The forward of one step; the backward follows through autograd."""
        held: dict[str, torch.Tensor] = {k: s.get() for k, s in self._slots.items()}
        held.update(self._fixed)
        for key, i in self._inputs.items():
            held[key] = tensors[i].detach()                    # detach: the boundary of autograd
        env = Environment(held, self.device)
        with torch.no_grad():
            outputs = self._forward(env)
        call = Call(env, self._backward)
        params = [[s.get() for s in slots] for slots in self._params]
        inputs = [tensors[i] for i in self.generated.input_grads]
        # What is an input comes back as a fresh alias: autograd keeps it apart from the original.
        known = {id(t) for t in held.values()}
        outputs = [o.view_as(o) if id(o) in known else o for o in outputs]
        flat = connect(call, self._receive, outputs, self._non_differentiable, params, inputs)
        return self.result.fill(flat)

    def _receive(self, call: Call, grads: list[torch.Tensor | None]) -> None:
        """Move the gradients of the outputs into the environment; empties the list."""
        from rkmate.errors import BackwardError

        unplanned = [i for i, g in enumerate(grads)
                     if g is not None and not self.wanted[i] and self.capture.differentiable[i]]
        if unplanned:
            raise BackwardError(
                f"the loss uses output {unplanned[0]}, for which no backward was planned")
        for i, name in self._tangents:
            grad, grads[i] = grads[i], None
            shape, dtype, _ = self._meta[i]  # type: ignore[misc]
            if grad is None:
                grad = torch.zeros(shape, dtype=dtype, device=self.device)
            call.env.give((name,), grad.contiguous())


def slot(model: nn.Module, name: str, kind: str) -> TensorSlot:
    """The registry entry behind a dotted name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return TensorSlot(module._parameters if kind == "param" else module._buffers, leaf)
