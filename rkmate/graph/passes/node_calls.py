"""Nodes as calls of generated source: arguments, operators, everyday views, and functions of our own."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rkmate.ir.calls import Argument, Call, Constant, Device, Item, Name, Operator, Writer
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


def call_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | Item:
    """Return an operation on nodes, by their names; of ``getitem``, one of several results."""
    if target is operator.getitem:
        return Item(argument(args[0]), args[1])
    return Call(operator_of(target), tuple(map(argument, args)),
                tuple([(k, argument(a)) for k, a in kwargs.items()]))


_METHODS: dict[object, str] = {
    # A kernel may lay its result out otherwise than the tracer was told; reshape then copies.
    torch.ops.aten.view.default: "reshape", torch.ops.aten._unsafe_view.default: "reshape",
    torch.ops.aten.t.default: "t", torch.ops.aten.transpose.int: "transpose",
    torch.ops.aten.unsqueeze.default: "unsqueeze", torch.ops.aten.squeeze.dim: "squeeze",
    torch.ops.aten.expand.default: "expand", torch.ops.aten.permute.default: "permute",
    torch.ops.aten.select.int: "select", torch.ops.aten.split.Tensor: "split",
}


def view_method(node: fx.Node) -> str | None:
    """The tensor method that an everyday view is written as; None for every other operation."""
    return _METHODS.get(node.target)


class OwnFunction(ABC):
    """Operations as one node with several results. Two of equal text are equal."""

    name: str
    """The name of the generated function, without its prefix and its number."""
    prefix: str
    imports: tuple[str, ...] = ()
    """Statements that its text needs before it."""
    over: int | None = None
    """The position of the argument whose memory its first result may take. It is then passed once more, as
    keyword ``over``."""

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def _opname(self) -> str:
        return self.name

    @functools.cached_property
    def text(self) -> str:
        """The generated function under its own name; equal for equal computations."""
        return self.function(self.name)

    @abstractmethod
    def function(self, name: str, write: Writer = Writer()) -> str:
        """Return the generated function under another name. `write`: what its operations are written with."""

    @abstractmethod
    def values(self) -> tuple[torch.Tensor, ...]:
        """Tensors like the results."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, OwnFunction) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)
