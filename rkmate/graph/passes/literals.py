"""Arguments and operators of nodes as values of generated source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rkmate.ir.calls import Argument, Constant, Device, Name, Operator
from rkmate.torch_seam.schema import OpOverload, operator_name, overload_name


def _named(node: fx.Node) -> Argument:
    return Name(node.name)


def argument(value: Any, of_node: Callable[[fx.Node], Argument] = _named) -> Argument:
    """Return an argument of a node as a value. `of_node`: of another node, by default its name."""
    if isinstance(value, fx.Node):
        return of_node(value)
    if isinstance(value, int) or value is None:
        return _number(value)
    if isinstance(value, (list, tuple)):
        return tuple([argument(v, of_node) for v in value])
    if isinstance(value, float):
        finite = value == value and abs(value) != float("inf")
        return Constant(repr(value) if finite else f'float("{value}")')
    if isinstance(value, (str, complex)):
        return Constant(repr(value))
    if isinstance(value, torch.device):
        return Device(str(value))
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return Constant(str(value))
    raise TypeError(f"no literal for {value!r}")


@functools.lru_cache(maxsize=1 << 12, typed=True)
def _number(value: int | None) -> Constant:
    return Constant(repr(value))


@functools.lru_cache(maxsize=1 << 12)
def operator_of(target: OpOverload) -> Operator:
    """Return an operator by its name."""
    return Operator(f"torch.ops.{target.namespace}.{operator_name(target)}.{overload_name(target)}")
