"""Operations as Python expressions, under free names."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any, Protocol

from torch import fx

from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Block
from rkmate.graph.capture.capture import Source
from rkmate.graph.passes.functions import OwnFunction
from rkmate.graph.passes.literals import literal
from rkmate.graph.passes.view_methods import view_method
from rkmate.torch_seam.schema import OpOverload, operator_name, overload_name

# -- Names -----------------------------------------------------------------------------------------
#
# Names that are given once each.


class NameTable:
    """Names of values that are visible together: each name is given once, and none is a reserved word."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def copied(self) -> NameTable:
        """Return an independent copy with the names given so far."""
        made = NameTable()
        made._reserved, made._taken, made._counts = self._reserved, {*self._taken}, {**self._counts}
        return made

    def fresh(self, base: str) -> str:
        """Return `base` for the first use of this name, then ``base_2``, ``base_3``; a reserved word gets an
        underscore."""
        if base in self._reserved:
            return self.fresh(f"{base}_")
        name, n = base, self._counts.get(base, 0)
        while not n or name in self._taken or name in self._reserved:
            n += 1
            name = base if n == 1 else f"{base}_{n}"
        self._counts[base] = n
        self._taken.add(name)
        return name


def letters(n: int) -> str:
    """Return the letters of number `n`, counted from 0: ``a`` to ``z``, then ``aa``, ``ab`` ..."""
    text = string.ascii_lowercase[n % 26]
    return letters(n // 26 - 1) + text if n >= 26 else text


# -- Expressions -----------------------------------------------------------------------------------
#
# Python expressions for the values and operations of a program.


class Naming(Protocol):
    """Names that expressions use for their inputs."""

    def value(self, j: int) -> str:
        """Return a D node's tensor."""

    def source(self, source: Source) -> str:
        """Return a parameter, a buffer, a constant or an input."""

    def namespace(self, name: str) -> str:
        """Return a namespace of operators."""

    def function(self, tiled: OwnFunction) -> str:
        """Return the function of a tiled computation."""


def source_key(source: Source) -> str:
    """Return the key under which the run time finds what the caller holds."""
    return f"{source.kind}:{source.key}"


def operator_namespaces(node: fx.Node) -> set[str]:
    """Return the operator namespaces of a node: ``aten`` for ``aten.mm.default``; none if the node is not an
    operation."""
    target = node.target
    if isinstance(target, OwnFunction):
        return target.namespaces()
    return {str(target.namespace)} if isinstance(target, OpOverload) else set()


def local_names(program: Program, block: Block | None, c: tuple[int, ...],
                table: NameTable) -> dict[int, str]:
    """Return names of one block's values, by what they are and not by where they stand: the same for
    identical blocks, so that their functions are the same.

    `c`: the block's C nodes.
    """
    names: dict[int, str] = {}
    cd = program.cd
    for i in c:
        target = program.operation[i].target
        outputs = cd.c[i].outputs
        base = operator_name(target, "value").lstrip("_") or "value"
        if len(outputs) > 1:
            base = table.fresh(base)
            for j in outputs:
                names[j] = table.fresh(f"{base}_{letters(program.position[j] or 0)}")
        elif outputs:
            names[outputs[0]] = table.fresh(base)
    if block is not None:
        for k, j in enumerate(block.d):
            if j not in names:
                names[j] = table.fresh("grad" if k in block.graph.output_grads else "x")
    return names


class Expressions:
    """Python expressions for a program's values, under the names that somebody gives."""

    def __init__(self, program: Program, naming: Naming) -> None:
        self.program = program
        self.naming = naming

    def value(self, node: fx.Node) -> str:
        """Return the expression of a tensor: what holds its storage, or views of that."""
        where = self.program.storage[node]
        if node not in self.program.views:
            return self.naming.value(where) if isinstance(where, int) else self.naming.source(where)
        if node.target.__class__.__name__ == "builtin_function_or_method":      # operator.getitem
            return f"{self.call(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
        return self.call(node)

    def call(self, node: fx.Node) -> str:
        """Return the call of an operation; the everyday views as methods of their tensor."""
        method = view_method(node)
        if method is not None and not node.kwargs and isinstance(node.args[0], fx.Node):
            rest = ", ".join(self._argument(a) for a in node.args[1:])
            return f"{self.value(node.args[0])}.{method}({rest})"
        return self._call(node.target, node.args, node.kwargs)

    def call_alternative(self, node: fx.Node, which: int) -> str:
        """Return the call of another kernel of an operation."""
        other = self.program.alternatives[node][which]
        return self._call(other.target, other.args, {})

    def call_in_place(self, node: fx.Node, donor: int) -> str:
        """Return the call of an operation that writes its result over the D node `donor`."""
        way = self.program.in_place[node][donor]
        arguments = list(node.args)
        if way.swapped:
            arguments[:2] = reversed(arguments[:2])
        keywords = dict(node.kwargs)
        if way.keyword is not None:
            keywords[way.keyword] = node.args[way.argument]
        return self._call(way.target, arguments, keywords)

    def _call(self, target: Any, args: Any, kwargs: Any) -> str:
        parts = [self._argument(a) for a in args]
        parts += [f"{k}={self._argument(v)}" for k, v in kwargs.items()]
        return f"{self._operator(target)}({', '.join(parts)})"

    def _operator(self, target: OpOverload | OwnFunction) -> str:
        """Return the text of an operator: ``aten.mm.default``."""
        if isinstance(target, OwnFunction):
            return self.naming.function(target)
        return f"{self.naming.namespace(target.namespace)}.{operator_name(target)}.{overload_name(target)}"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.value(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        return literal(value)

