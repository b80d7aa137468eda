"""Containers of tensors: torch's trees (pytree), and a walk over everything that an object holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device,
         torch.layout, torch.memory_format)
"""Types of values in which no tensor can be."""


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
        else:
            stack.extend(reversed(list(attributes_in(item).values())))
    return found


__all__ = ["PLAIN", "attributes_in", "objects_in", "pytree", "tensors_in"]
