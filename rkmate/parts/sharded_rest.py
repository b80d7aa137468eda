"""The rest of a sharded model's forward, after its last sharded module: a norm, the head, the loss.

It is captured, and runs, as the model's own forward with stubs instead of the sharded modules, which hand out
what these have returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rkmate.errors import CaptureError
from rkmate.graph.capture.structure import GIVEN, Structure, take_apart
from rkmate.torch_seam.modules import submodules_of
from rkmate.torch_seam.patches.libraries import leave_tensors


class Reached(BaseException):
    """The last sharded module has returned: what follows is planned as a whole."""


_stubs: weakref.WeakKeyDictionary[nn.Module, tuple[RestOfForward, nn.Module]] = weakref.WeakKeyDictionary()
"""Stub -> the forward that it belongs to, and the sharded module that it replaces."""


class Stub(nn.Module):
    """Replaces a sharded module while the rest of the forward is traced: it has its attributes, and returns
    what it has returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module has returned in this step."""
        rest, module = _stubs[self]
        return rest.serve(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(_stubs[self][1], name)


class RestOfForward:
    """Knows what sharded modules have returned in a forward, and runs the rest of it from there."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """`units`: the outermost sharded modules."""
        self.own: Callable[..., Any] = model.forward
        """The model's own forward."""
        self.returned: list[tuple[nn.Module, list[torch.Tensor], Structure]] = []
        """The sharded modules that have returned in this call, and their results."""
        self._serving: list[tuple[nn.Module, list[torch.Tensor], Structure]] | None = None
        self._places = [(parent, name, unit) for parent in model.modules()
                        for name, unit in submodules_of(parent).items()
                        if unit is not None and any(unit is u for u in units)]
        self._stand_ins: dict[nn.Module, nn.Module] = {}
        for unit in units:
            stub = self._stand_ins[unit] = Stub()
            _stubs[stub] = self, unit

    def waits_for(self, module: nn.Module) -> bool:
        """Return whether the results of a module are needed: it is sharded, and no rest runs. Where hooks of
        sharded modules may hand tensors to the rest, that runs as it is: they do not run again with it."""
        if not self.returned and leave_tensors(m for unit in self._stand_ins for m in unit.modules()):
            return False
        return module in self._stand_ins and self._serving is None

    def note(self, module: nn.Module, result: Any) -> int:
        """Note that a sharded module has returned. Returns how many have."""
        self.returned.append((module, *take_apart(result, result=True)))
        return len(self.returned)

    @property
    def given(self) -> list[torch.Tensor]:
        """The tensors that sharded modules have returned."""
        return [t for _, tensors, _ in self.returned for t in tensors]

    @contextmanager
    def stubs(self) -> Iterator[None]:
        """Replace the sharded modules by their stubs, if they are not replaced already."""
        before = [submodules_of(parent)[name] for parent, name, _ in self._places]
        for parent, name, unit in self._places:
            submodules_of(parent)[name] = self._stand_ins[unit]
        try:
            yield
        finally:
            for (parent, name, _), module in zip(self._places, before, strict=True):
                submodules_of(parent)[name] = module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward with the given results of sharded modules. Raises `CaptureError` if it
        calls other sharded modules than the step did."""
        given = iter(kwargs.pop(GIVEN))
        served = [(module, [next(given) for _ in tensors], structure)
                  for module, tensors, structure in self.returned]
        before, self._serving = self._serving, served
        try:
            with self.stubs():
                result = self.own(*args, **kwargs)
            if self._serving:
                raise CaptureError("the forward calls fewer sharded modules with their results given")
            return result
        finally:
            self._serving = before

    def serve(self, module: nn.Module) -> Any:
        """Return the given result of a sharded module."""
        if not self._serving or self._serving[0][0] is not module:
            raise CaptureError("the forward calls sharded modules in another order")
        _, tensors, structure = self._serving.pop(0)
        # A copy marks the place in the graph from which on the rest begins.
        return structure.fill([t.clone() for t in tensors])
