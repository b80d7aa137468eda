"""Side effects of a traced forward: attributes that it assigns, and random numbers of the host."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rkmate.errors import CaptureError
from rkmate.graph.capture.structure import take_apart
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.modules import HOOKS, REGISTRIES, WEIGHT_LISTS, forward_pre_hooks_of
from rkmate.torch_seam.patches.libraries import weight_made_by

MISSING = object()
"""Stands for an attribute that is not there."""


@dataclass(frozen=True)
class Assigned:
    """An attribute that a forward has assigned."""

    path: str
    holder: Any
    """The module, or an object that a module has as an attribute (its configuration, say)."""
    name: str
    old: Any
    new: Any

    def repeat(self) -> None:
        """Assign it again; with zeros in the place of traced tensors."""
        if self.new is MISSING:
            self.holder.__dict__.pop(self.name, None)
        elif not tensors_in(self.new):
            self.holder.__dict__[self.name] = self.new
        elif not is_made_by_a_hook(self):
            tensors, structure = take_apart(self.new, result=True)
            self.holder.__dict__[self.name] = structure.fill([
                torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors])


class PythonState:
    """The attributes of every submodule, and of the objects that they hold, at one moment: to
    compare with and to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, m, dict(m.__dict__),
                          {f: dict(m.__dict__[f]) for f in REGISTRIES if f in m.__dict__})
                         for name, m in model.named_modules()]
        objects = {id(v): (f"{name + '.' if name else ''}{k}", v) for name, m, d, _ in self._modules
                   for k, v in d.items() if _is_object(v)}
        self._holders: list[tuple[str, Any, dict[str, Any]]] = [
            *((path, m, attributes) for path, m, attributes, _ in self._modules),
            *((path, v, dict(v.__dict__)) for path, v in objects.values())]
        self._lists = [(f"{path}.{k}" if path else k, v, list(v)) for path, _, d, _ in self._modules
                       for k, v in d.items() if type(v) is list and any(type(t) is torch.Tensor for t in v)]

    def restore(self) -> None:
        """Put every attribute and every registry back."""
        for _, _, attributes, registries in self._modules:
            for field, content in registries.items():
                now = attributes[field]
                if not _same(now, content):
                    now.clear()
                    now.update(content)
        for _, holder, attributes in self._holders:
            if _same(holder.__dict__, attributes):
                continue
            for k in {*holder.__dict__, *attributes}:
                if k not in attributes:
                    del holder.__dict__[k]
                elif holder.__dict__.get(k, MISSING) is not attributes[k]:
                    holder.__dict__[k] = attributes[k]
        for _, members, were in self._lists:
            if not _same_members(members, were):
                members[:] = were

    def changed_lists(self) -> list[tuple[str, list[torch.Tensor]]]:
        """Return the lists of tensors in attributes whose members are other objects now, with the tensors
        that they had."""
        return [(path, [t for t in content if type(t) is torch.Tensor])
                for path, members, content in self._lists if not _same_members(members, content)]

    def restore_hooks(self) -> None:
        """Put the hooks back alone."""
        for _, m, _, registries in self._modules:
            for field in HOOKS:
                m.__dict__[field].clear()
                m.__dict__[field].update(registries[field])

    def assigned(self) -> list[Assigned]:
        """Return the attributes that are other objects now."""
        found = []
        for path, holder, attributes in self._holders:
            if _same(holder.__dict__, attributes):
                continue
            for k in sorted({*holder.__dict__, *attributes}):
                old, new = attributes.get(k, MISSING), holder.__dict__.get(k, MISSING)
                # A recurrent layer keeps lists of its weights, which the tracer swaps.
                if old is not new and not (isinstance(holder, nn.RNNBase) and k in WEIGHT_LISTS):
                    found.append(Assigned(f"{path + '.' if path else ''}{k}", holder, k, old, new))
        return found


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether these are the same objects under the same names."""
    return len(now) == len(before) and all(now.get(k, MISSING) is v for k, v in before.items())


def _same_members(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _is_object(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (
        nn.Module, torch.Tensor, type, ModuleType, dict, list, set, FunctionType, MethodType,
        BuiltinFunctionType))


def is_made_by_a_hook(assigned: Assigned) -> bool:
    """Return whether torch's own (old) normalisations and pruning compute it before each forward."""
    holder = assigned.holder
    hooks = forward_pre_hooks_of(holder).values() if isinstance(holder, nn.Module) else ()
    return any(weight_made_by(h) == assigned.name for h in hooks)


class HostDraws:
    """The states of Python's and NumPy's own generators."""

    def __init__(self) -> None:
        self._python = random.getstate()
        # NumPy's global generator exists only once NumPy is loaded.
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def refuse_change(self, model: nn.Module) -> None:
        """Raise when the forward has drawn from one of them: a captured step would repeat the draw."""
        drew = []
        if random.getstate() != self._python:
            drew.append("random")
        if self._numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            if now[2:] != self._numpy[2:] or (now[1] != self._numpy[1]).any():
                drew.append("numpy.random")
        if drew:
            raise CaptureError(
                f"{type(model).__name__}: the forward draws from {' and '.join(drew)}; a captured "
                "step would repeat the draw of its trace. Draw with torch (torch.rand), which is "
                "part of the step.")

    def restore(self) -> None:
        """Put both back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
