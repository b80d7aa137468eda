"""What a plan is specialised on, read cheaply at each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rkmate.graph.library_paths import is_observer
from rkmate.graph.state import Assigned
from rkmate.graph.structure import Structure, take_apart

_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_SKIPPED = {"training", "_is_full_backward_hook", "_is_hf_initialized"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MISSING = object()


class Watch:
    """A module's flags and Python attributes.

    A captured step has them baked in, so another value means another plan.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.take()

    def take(self) -> None:
        """Take down the attributes as they are now."""
        self._attributes = _attributes(self._model)

    def follow(self, assigned: Sequence[Assigned]) -> None:
        """Take down the new values of attributes that no plan tells from their old ones."""
        new = {(id(a.holder.__dict__), a.name): a for a in assigned}
        for k, (d, key, value) in enumerate(self._attributes):
            a = new.get((id(d), key))
            if a is not None and a.old is value:
                self._attributes[k] = d, key, a.new

    def flags(self) -> tuple[Any, ...]:
        """Train flags, hooks, and which parameters take a gradient."""
        found: list[Any] = []
        todo: list[nn.Module] = [self._model]
        for m in todo:                       # grows while it is walked
            d = m.__dict__
            found.append(d.get("training", m.training))
            for name in _HOOKS:
                count = sum(not is_observer(h) for h in d[name].values()) if d[name] else 0
                if count:
                    found.append((name, count))
            for p in d["_parameters"].values():
                found.append(p is not None and p.requires_grad)
            todo.extend(c for c in d["_modules"].values() if c is not None)
        return tuple(found)

    def attributes(self) -> int:
        """A number that stands for the values of the plain attributes: equal for equal values."""
        for d, key, value in self._attributes:
            if d.get(key, _MISSING) is not value:
                break
        else:
            return 0
        now = tuple(_plain(d.get(key, _MISSING)) for d, key, _ in self._attributes)
        first = tuple(_plain(value) for _, _, value in self._attributes)
        if now == first:
            return 0
        return self._numbers.setdefault(now, len(self._numbers) + 1)

    def places(self) -> tuple[Any, ...]:
        """Devices, dtypes and shapes of parameters and buffers."""
        found: list[Any] = []
        todo: list[nn.Module] = [self._model]
        for m in todo:
            d = m.__dict__
            for registry in (d["_parameters"], d["_buffers"]):
                for t in registry.values():
                    if t is not None:
                        found.append((t.dtype, t.device, t.shape))
            todo.extend(c for c in d["_modules"].values() if c is not None)
        return tuple(found)


def _plain(value: Any) -> Any:
    return (type(value), value) if isinstance(value, (*_SCALARS, tuple)) else id(value)


def _attributes(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    found: list[tuple[dict[str, Any], str, Any]] = []
    seen: set[int] = set()
    todo: list[tuple[Any, bool]] = [(m, True) for m in model.modules()]
    while todo:
        item, deep = todo.pop()
        d = getattr(item, "__dict__", None)
        if not isinstance(d, dict) or id(d) in seen:
            continue
        seen.add(id(d))
        for key, value in d.items():
            if key in _SKIPPED:
                continue
            if _is_scalar(value):
                found.append((d, key, value))
            elif deep and not isinstance(value, (nn.Module, torch.Tensor, type, ModuleType, dict, list,
                                                 set, FunctionType, MethodType, BuiltinFunctionType)):
                todo.append((value, False))
    return found


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS) or \
        (isinstance(value, tuple) and all(isinstance(v, _SCALARS) for v in value))


def signature(watch: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]
              ) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """What a plan is specialised on, flags first; and the tensors among the arguments."""
    tensors, structure = take_apart((tuple(args), dict(kwargs)), result=False)
    shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad,
                    t.stride() if t.layout is torch.strided and not t.is_nested else t.layout)
                   for t in tensors)
    kinds = {"cpu", *(t.device.type for t in tensors)}
    autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds)
                     if torch.is_autocast_enabled(kind))
    return (watch.flags(), watch.attributes(), shapes, structure.spec, _constants(structure), autocast,
            watch.places(), torch.get_default_dtype()), tensors


def _constants(structure: Structure) -> tuple[Any, ...]:
    return tuple(frozen(c, set()) for c in structure.constants())


def frozen(value: Any, above: set[int]) -> Any:
    """A hashable stand-in: equal for values that a captured step cannot tell apart."""
    if isinstance(value, (*_SCALARS, torch.layout, torch.memory_format)):
        return type(value), value
    if id(value) in above:
        return "itself"
    above = above | {id(value)}
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(v, above) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((frozen(k, above), frozen(v, above)) for k, v in value.items())
    if isinstance(value, (type, FunctionType, MethodType, BuiltinFunctionType, nn.Module)):
        return "object", id(value)
    state = getattr(value, "__dict__", None)
    if state:
        return type(value), tuple((k, frozen(v, above)) for k, v in sorted(state.items()))
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
