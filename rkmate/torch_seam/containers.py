"""Containers of tensors: torch's trees (pytree), and a walk over everything that an object holds."""

from __future__ import annotations

import functools
import weakref
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device,
         torch.layout, torch.memory_format)
"""Types of values in which no tensor can be: they are compared by value."""


def attributes_in(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its dictionary and in slots."""
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return state


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that can be reached through containers and instance attributes, modules left out."""
    return [item for item in objects_in(value) if isinstance(item, torch.Tensor)]


def objects_in(value: Any) -> list[Any]:
    """Return everything that can be reached through containers and instance attributes, modules left out."""
    found: list[Any] = []
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (*PLAIN, type, torch.nn.Module)) or id(item) in seen:
            continue
        seen.add(id(item))
        found.append(item)
        if isinstance(item, torch.Tensor):
            continue
        if isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(reversed(list(item)))
        elif isinstance(item, functools.partial):
            stack.extend(reversed([item.func, *item.args, *item.keywords.values()]))
        elif isinstance(item, MethodType):
            stack.append(item.__self__)
        else:
            stack.extend(reversed(list(attributes_in(item).values())))
    return found


def tensors_behind(value: Any) -> list[torch.Tensor]:
    """Return the tensors that functions in a value close over, or are methods of, and those that weak
    references lead to: a copy of the value has the same ones."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    stack = [value]
    while stack:
        for item in objects_in(stack.pop()):
            behind = _behind(item)
            if behind and id(item) not in seen:
                seen.add(id(item))
                found += tensors_in(behind)
                stack.append(behind)
    return found


def _behind(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        closed = [cell.cell_contents for cell in item.__closure__ or () if cell != CellType()]
        return [*closed, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
    if isinstance(item, BuiltinMethodType):
        return [item.__self__]
    return [item()] if isinstance(item, weakref.ref) else []


__all__ = ["PLAIN", "attributes_in", "objects_in", "pytree", "tensors_behind", "tensors_in"]
