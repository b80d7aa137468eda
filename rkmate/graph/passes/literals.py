"""Constant arguments as Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def literal(value: Any) -> str:
    """Return a Python expression for a constant argument."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    raise TypeError(f"no literal for {value!r}")


def argument(value: Any) -> str:
    """Return a Python expression for an argument that may be a node (by its name), or a list of nodes."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(argument, value))}]"
    return literal(value)
