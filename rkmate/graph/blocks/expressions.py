"""A program's operations and values as calls, under names that somebody gives."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Block
from rkmate.graph.capture.captured import Source
from rkmate.graph.ops.collectives import WAITED, started
from rkmate.graph.passes.node_calls import OwnFunction, argument, operator_of, view_method
from rkmate.ir.calls import Argument, Call, Defined, Item, Method, NameTable, Operator, letters
from rkmate.torch_seam.schema import OpOverload, operator_name


class Naming(Protocol):
    """Names and literals for the values that calls read."""

    def value(self, j: int) -> Argument:
        """A D node's tensor."""

    def source(self, source: Source) -> Argument:
        """A parameter, a buffer, a constant or an input."""


def source_key(source: Source) -> str:
    """Return the key under which the run time finds what the caller holds."""
    return f"{source.kind}:{source.key}"


def operators_of(node: fx.Node) -> Iterator[OpOverload]:
    """Yield the operator of a node, or those in its tiles or its group; none for what is no operation."""
    inside: Any = getattr(node.target, "graph", None)
    for n in (node,) if inside is None else inside.nodes:
        if isinstance(n.target, OpOverload):
            yield n.target


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
    """Calls of a program's operations. Views are written where they are read."""

    def __init__(self, program: Program, naming: Naming) -> None:
        self.program = program
        self.naming = naming

    def value(self, node: fx.Node) -> Argument:
        """Return a tensor: what holds its storage, or views of that."""
        if node not in self.program.views:
            where = self.program.storage[node]
            return self.naming.value(where) if isinstance(where, int) else self.naming.source(where)
        if node.target is operator.getitem:
            return Item(self.value(node.args[0]), int(node.args[1]))  # type: ignore[arg-type]
        return self.call(node)

    def arguments(self, values: Iterable[Any]) -> tuple[Argument, ...]:
        """Return the arguments of an operation."""
        of_node = self.value
        return tuple([argument(value, of_node) for value in values])

    def call(self, node: fx.Node) -> Call:
        """Return the call of an operation; the everyday views as methods of their tensor."""
        method = view_method(node)
        if method is not None and not node.kwargs and isinstance(node.args[0], fx.Node):
            return Call(Method(method), self.arguments(node.args))
        return self._call(node.target, node.args, node.kwargs)

    def call_alternative(self, node: fx.Node, which: int) -> Call:
        """Return the call of another kernel of an operation."""
        other = self.program.alternatives[node][which]
        return self._call(other.target, other.args, {})

    def call_started(self, node: fx.Node) -> Call:
        """Return the call that starts a collective."""
        return self._call(started(node.target), node.args, node.kwargs)

    @staticmethod
    def call_waiting(result: Argument) -> Call:
        """Return the call that waits for a collective that was started. `result`: of the start."""
        return Call(operator_of(WAITED), (result,))

    def call_in_place(self, node: fx.Node, donor: int) -> Call:
        """Return the call of an operation that writes its result over the D node `donor`."""
        way = self.program.in_place[node][donor]
        arguments = list(node.args)
        if way.swapped:
            arguments[:2] = reversed(arguments[:2])
        keywords = dict(node.kwargs)
        if way.keyword is not None:
            keywords[way.keyword] = node.args[way.argument]
        return self._call(way.target, arguments, keywords)

    def _call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return Call(self._target(target, args, kwargs), self.arguments(args),
                    tuple(zip(kwargs, self.arguments(kwargs.values()), strict=True)))

    def _target(self, target: OpOverload | OwnFunction, args: Sequence[Any],
                kwargs: Mapping[str, Any]) -> Operator | Method | Defined:
        """The called function and its arguments."""
        return target if isinstance(target, OwnFunction) else operator_of(target)
