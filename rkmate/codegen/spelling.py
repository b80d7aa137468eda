"""How an operation is written: as the quickest call that reaches it.

An operator called by its overload (``aten.mm.default``) takes each argument through the interpreter of
torch's scripts, which for lists and numbers takes longer than a small operation itself. Most operators have
a function or a method of their own as well (``x.mm(y)``, ``torch.addmm``). One is written where it hands the
dispatcher the very same overload with the same arguments: that is tried once for each kind of call, on the
tensors without contents of the trace, and nothing runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx

from rkmate.codegen.slices import Look
from rkmate.graph.blocks.expressions import Expressions, Naming
from rkmate.graph.blocks.lower import Program
from rkmate.graph.passes.node_calls import OwnFunction, view_method
from rkmate.ir.calls import Argument, Call, Defined, Item, Method, Name, Operator
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import OpOverload, operator_name
from rkmate.torch_seam.tensors import TorchDispatchMode

aten = torch.ops.aten

_SAME_KERNEL: dict[OpOverload, OpOverload] = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")}
"""Overloads whose kernel calls another one, with the number as a tensor."""
_SPREAD = {"reshape", "expand", "permute"}
"""Methods that take sizes one by one: a list takes twice as long."""

_BIAS_FIRST = {"addmm", "baddbmm", "addmv"}
"""Read better as functions."""

Reached = tuple[object, Sequence[Any], Mapping[str, Any]]


class _Enough(Exception):
    """The dispatcher was reached."""


class _Reaching(TorchDispatchMode):
    """Takes down the first operation that arrives, and does not run it."""

    reached: Reached | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reached = func, args, kwargs or {}
        raise _Enough


def _reached(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reached | None:
    """Return what a call passes to the dispatcher; None if the function does not take these arguments."""
    mode = _Reaching()
    try:
        with torch.no_grad(), mode:
            function(*args, **kwargs)
    except (_Enough, TypeError, ValueError, RuntimeError):
        return mode.reached
    return None


_spellings: dict[tuple[Any, ...], str] = {}
"""By operator and kinds of arguments: ``method``, ``torch`` or nothing."""


def spelling(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return how an operator may be called with such arguments (nodes, or tensors without contents): as a
    ``method`` of its first argument, as a function of ``torch``, or (nothing) only by its overload."""
    key = (target, *map(_kind, args), *((k, _kind(v)) for k, v in kwargs.items()))
    found = _spellings.get(key)
    if found is None:
        found = _spellings[key] = _spelling(target, _values(tuple(args)), _values(dict(kwargs)))
    return found


def _spelling(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    name = operator_name(target)
    own: list[tuple[str, Callable[..., Any] | None]] = []
    if target.namespace == "aten" and args and isinstance(args[0], torch.Tensor) and name not in _BIAS_FIRST \
            and not name.startswith("_"):
        own.append(("method", getattr(torch.Tensor, name, None)))
    if target.namespace == "aten":
        own.append(("torch", getattr(torch, name, None)))
    own = [(how, f) for how, f in own if isinstance(f, (MethodDescriptorType, BuiltinFunctionType))]
    wanted = _reached(target, args, kwargs) if own else None
    if wanted is None:
        return ""
    for how, function in own:
        assert function is not None
        found = _reached(function, args, kwargs)
        if found is not None and (found[0] is target or found[0] is _SAME_KERNEL.get(target)) \
                and _equal(found[1:], wanted[1:]):
            return how
    return ""


def _kind(value: Any) -> Any:
    """Return everything that the choice among a function's overloads can depend on."""
    if isinstance(value, fx.Node):
        value = value.meta[VALUE]
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim() == 0, value.dtype
    if isinstance(value, (list, tuple)):
        return list, *map(_kind, value)
    return type(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and bool(a == b)


def _values(argument: Any) -> Any:
    """Return an argument of a node with its nodes replaced by tensors without contents."""
    return fx.map_arg(argument, lambda n: n.meta[VALUE])


class Spelled(Expressions):
    """Calls of generated source, each as the quickest. Views that are read several times get names of their
    own."""

    def __init__(self, program: Program, naming: Naming, views: Views | None = None) -> None:
        """`views`: of one function; without them, each view is written where it is read."""
        super().__init__(program, naming)
        self.views = views

    def value(self, node: fx.Node) -> Argument:
        if self.views is None or node not in self.program.views:
            return super().value(node)
        return self.views.value(node, super().value)

    def call(self, node: fx.Node) -> Call:
        method = view_method(node)
        if method in _SPREAD and not node.kwargs and isinstance(node.args[1], (list, tuple)) and node.args[1]:
            return Call(Method(method), self.arguments((node.args[0], *node.args[1])))
        return super().call(node)

    def _target(self, target: OpOverload | OwnFunction, args: Sequence[Any],
                kwargs: Mapping[str, Any]) -> Operator | Method | Defined:
        how = "" if isinstance(target, OwnFunction) else spelling(target, args, kwargs)
        if not how:
            return super()._target(target, args, kwargs)
        name = operator_name(target)
        return Method(name) if how == "method" else Operator(f"torch.{name}")


class Views:
    """The views that a function reads several times: each is made once, and has a name until what it looks at
    ends."""

    def __init__(self, program: Program, naming: Any, operations: Iterable[fx.Node],
                 keys: dict[Any, int] | None = None) -> None:
        """`operations`: of the function. `naming`: as for `LocalNames`. `keys`: known numbers of views of
        this program; new ones are added."""
        self._keys: dict[Any, int] = {} if keys is None else keys
        self._program = program
        self._naming = naming
        self._uses: Counter[int] = Counter()
        self._names: dict[int, tuple[str, Any]] = {}
        """By key: the name, and the storage."""
        self.new: list[Look] = []
        """Views to write before the current statement."""
        for operation in operations:
            for node in operation.all_input_nodes:
                self._count(node)

    def _count(self, node: fx.Node) -> None:
        if node in self._program.views:
            key = self._key(node)
            self._uses[key] += 1
            if self._uses[key] == 1:
                self._count(node.args[0])  # type: ignore[arg-type]

    def _key(self, view: Any) -> int:
        """Return the number of a view; equal views have equal numbers."""
        found = self._keys.get(view)
        if found is None:
            base = view.args[0]
            of = (self._key(base),) if base in self._program.views else self._program.storage[base]
            key = view.target, of, repr(view.args[1:]), repr(view.kwargs)
            found = self._keys[view] = self._keys.setdefault(key, len(self._keys))
        return found

    def value(self, node: fx.Node, inline: Callable[[fx.Node], Argument]) -> Argument:
        """Return the view's name; where it is read once, what `inline` makes of it."""
        key, naming = self._key(node), self._naming
        if self._uses[key] < 2:
            return inline(node)
        if key not in self._names:
            call = inline(node)
            assert isinstance(call, (Call, Item))
            word = view_method(node) or operator_name(node.target, "part")
            where = self._program.storage[node]
            owner = naming.name(where) if isinstance(where, int) else naming.sources[where]
            name = naming.table.fresh(f"{owner}_{word}")
            self._names[key] = name, where
            self.new.append(Look(name, call, owner))
        return Name(self._names[key][0])

    def take_new(self) -> list[Look]:
        """Return the views that the last written statement is the first to read."""
        new, self.new = self.new, []
        return new

    def end(self, ds: Collection[int]) -> tuple[str, ...]:
        """Return the names that end with these D nodes."""
        gone = [key for key, (_, where) in self._names.items() if isinstance(where, int) and where in ds]
        return tuple(self._names.pop(key)[0] for key in gone)
