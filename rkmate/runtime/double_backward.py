"""Backwards of backwards around a planned step, by the original's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.random_state import RandomState
from rkmate.errors import BackwardError
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import take_apart
from rkmate.runtime.environment import generators_at
from rkmate.runtime.guards import Guards, ModuleReader, guards_of
from rkmate.runtime.segments import Call
from rkmate.torch_seam.dtensor import is_dtensor
from rkmate.torch_seam.tensors import gradient_is_asked_for

# A double backward (``create_graph=True``) around a planned step: gradient penalties, Hessians.
#
# A planned backward leaves no graph to differentiate. So where one is wanted, the original's forward runs
# once more, with the draws of the call, and autograd differentiates that. The plan's own step stays as it
# is: an ordinary backward through the same forward may follow.


_INSTEAD = ("compute the inner gradient in the forward of the module that is wrapped (torch.autograd.grad: "
            "see 'Gradient penalties' in docs/recipes.md), on the original module, or with rkmate.dtr")


class _Runs(nn.Module):
    """A call of a module, for `torch.func.functional_call`."""

    def __init__(self, model: nn.Module, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call."""
        return self._run(args, kwargs)


class Original(NamedTuple):
    """A call without a plan."""

    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    reader: ModuleReader
    key: Guards
    """The signature of the call."""

    def outputs(self, capture: Capture, tensors: Sequence[torch.Tensor],
                held: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors of the original, on the call's arguments. Raises `BackwardError` where
        the module is no longer what it was. `held`: parameters and buffers of the call, by name; those of
        `torch.func.functional_call` are no longer in the module."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            given = dict(self.key.autocast)
            for kind in {"cpu", *given, *devices.autocast_kinds(t.device for t in tensors)}:
                stack.enter_context(torch.autocast(kind, dtype=given.get(kind), enabled=kind in given))
            args, kwargs = capture.inputs.fill(list(tensors))
            now, _ = guards_of(self.reader, args, kwargs)
            if now._replace(kinds=self.key.kinds, values=self.key.values) != self.key:
                raise BackwardError("the module was changed between the forward and a backward with "
                                    f"create_graph=True, which runs the forward once more: {_INSTEAD}")
            model = self.reader.model
            own = dict(chain(model.named_parameters(remove_duplicate=False),
                             model.named_buffers(remove_duplicate=False)))
            others = {f"model.{n}": t for n, t in held.items()
                      if n in own and own[n] is not t and not is_dtensor(own[n])}
            found = self.run(args, kwargs) if not others else torch.func.functional_call(
                _Runs(model, self.run), others, (args, kwargs))
            return take_apart(found, result=True)[0]


class Again(NamedTuple):
    """Data that a second run of one call's original needs."""

    original: Original
    capture: Capture
    tensors: Sequence[torch.Tensor]
    """Among the arguments."""
    draws: RandomState | None
    """State of the generators before the forward; None if nothing is drawn."""
    targets: Mapping[str, torch.Tensor | int]
    """Targets of the gradients, by source key: a parameter, or the number of an input."""
    held: Mapping[str, torch.Tensor]
    """Parameters and buffers of the call, by name."""
    buffers: Sequence[torch.Tensor]
    """Buffers that the forward overwrites."""
    obstacle: str
    """Why the call cannot run a second time; empty if it can."""
    ran: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """The arguments and outputs of the second run; empty before that: several backwards share it."""

    def gradients(self, call: Call, given: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """Return gradients by source key, with a graph. `given`: gradients of the outputs, by number."""
        if self.obstacle:
            raise BackwardError("there is no double backward (create_graph=True) of this step: "
                                f"{self.obstacle}; {_INSTEAD}")
        call.check_untouched()
        if not self.ran:
            self.ran.append(self._run(call))
        tensors, outputs = self.ran[0]
        targets = {k: tensors[t] if isinstance(t, int) else t for k, t in self.targets.items()
                   if (not isinstance(t, int) or t < len(tensors))
                   and gradient_is_asked_for(self.tensors[t] if isinstance(t, int) else t)}
        if not targets:
            return dict.fromkeys(self.targets)
        numbers = list(given)
        grads = torch.autograd.grad([outputs[n] for n in numbers], list(targets.values()),
                                    [given[n] for n in numbers], create_graph=True, allow_unused=True)
        found = dict(zip(targets, grads, strict=True))
        return {k: found.get(k) for k in self.targets}      # an argument that is given twice: once, and None

    def _run(self, call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tensors = [t.view_as(t) if t.requires_grad else t for t in self.tensors]
        with ExitStack() as stack:
            before = [b.detach().clone() for b in self.buffers]
            if self.draws is not None:
                stack.enter_context(generators_at(call.env.device, self.draws))
            try:
                outputs = self.original.outputs(self.capture, tensors, self.held)
            finally:
                for buffer, value in zip(self.buffers, before, strict=True):
                    buffer.data.copy_(value)        # no new version: what was saved for a backward stands
        return tensors, outputs
