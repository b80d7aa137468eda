"""Names in generated source: the same for identical blocks, so that their functions are the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Block
from rkmate.graph.capture.capture import Source
from rkmate.graph.capture.operations import OpOverload
from rkmate.graph.passes.chunked_kernels import at_once
from rkmate.graph.passes.in_place import overwrites
from rkmate.graph.passes.simplify import is_view
from rkmate.graph.passes.view_methods import view_method


def source_key(source: Source) -> str:
    """The key under which the run time finds what the caller holds."""
    return f"{source.kind}:{source.key}"


def literal(value: Any) -> str:
    """A Python expression for a constant argument."""
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


def operator_name(node: fx.Node) -> str:
    """``aten.mm`` for ``aten.mm.default``; overloads other than the default are spelled out."""
    assert isinstance(node.target, OpOverload)
    return _spelled(node.target)


def _spelled(target: OpOverload) -> str:
    return f"{target.namespace}.{target._opname}.{target._overloadname}"


def operator_namespace(node: fx.Node) -> str:
    """``aten`` for ``aten.mm.default``; empty for what is no operation."""
    target = node.target
    return str(target.namespace) if isinstance(target, OpOverload) else ""


class BlockNames:
    """Local names of one block's values, by what they are and not by where they stand."""

    def __init__(self, program: Program, block: Block | None, c: tuple[int, ...]) -> None:
        self.program = program
        self.local: dict[int, str] = {}
        counts: dict[str, int] = {}

        def fresh(base: str) -> str:
            n = counts[base] = counts.get(base, 0) + 1
            return base if n == 1 else f"{base}_{n}"

        cd = program.cd
        for i in c:
            target = program.operation[i].target
            base = getattr(target, "_opname", "value").lstrip("_")
            if len(cd.c[i].outputs) > 1:
                base = fresh(base)
                for j in cd.c[i].outputs:
                    self.local[j] = f"{base}_{'abcdefghijklmnop'[program.position[j] or 0]}"
            else:
                for j in cd.c[i].outputs:
                    self.local[j] = fresh(base)
        if block is not None:
            for k, j in enumerate(block.d):
                if j not in self.local:
                    is_grad = k in block.graph.output_grads
                    self.local[j] = fresh("grad" if is_grad else "x")

    def of(self, j: int) -> str:
        """The local name of a D node."""
        if j not in self.local:
            self.local[j] = f"v{len(self.local)}"
        return self.local[j]


class Expressions:
    """Python expressions for the values that one generated function reads."""

    def __init__(self, program: Program, names: BlockNames) -> None:
        self.program = program
        self.names = names
        self.sources: dict[Source, str] = {}

    def source(self, source: Source) -> str:
        """A local name for a parameter, a buffer, a constant or an input."""
        if source not in self.sources:
            if source.kind == "input":
                base = "input"
            else:
                parts = [p for p in str(source.key).split(".") if not p.isdigit()]
                base = re.sub(r"\W", "_", "_".join(parts[-2:])) or "p"
                if base[0].isdigit():
                    base = "p" + base
            base = f"{base}_" if base in ("del", "env", "aten", "torch") else base
            taken = set(self.sources.values()) | set(self.names.local.values())
            name, n = base, 1
            while name in taken:
                n += 1
                name = f"{base}_{n}"
            self.sources[source] = name
        return self.sources[source]

    def value(self, node: fx.Node) -> str:
        """The expression of a tensor: a local, or views of one."""
        where = self.program.storage[node]
        owner = self._is_owner(node, where)
        if owner:
            return self.names.of(where) if isinstance(where, int) else self.source(where)
        if node.target.__class__.__name__ == "builtin_function_or_method":      # operator.getitem
            return f"{self.call(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
        return self.call(node)

    def _is_owner(self, node: fx.Node, where: int | Source) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        return not is_view(node)

    def call(self, node: fx.Node) -> str:
        """The call of an operation; the everyday views as methods of their tensor."""
        method = view_method(node)
        if method is not None and not node.kwargs and isinstance(node.args[0], fx.Node):
            rest = ", ".join(self.argument(a) for a in node.args[1:])
            return f"{self.value(node.args[0])}.{method}({rest})"
        args = [self.argument(a) for a in node.args]
        args += [f"{k}={self.argument(v)}" for k, v in node.kwargs.items()]
        return f"{operator_name(node)}({', '.join(args)})"

    def call_whole(self, node: fx.Node) -> str:
        """The call that does at once what an operation does part by part."""
        whole = at_once(node)
        assert whole is not None
        return f"{_spelled(whole.target)}({', '.join(map(self.argument, whole.args))})"

    def call_over(self, node: fx.Node, place: int) -> str:
        """The call of an operation that writes its result over the D node `place`."""
        way = next(w for w in overwrites(node, self.program.storage.__getitem__)
                   if self.program.storage[node.args[w.argument]] == place)  # type: ignore[index]
        arguments = list(node.args)
        if way.swapped:
            arguments[:2] = reversed(arguments[:2])
        args = [self.argument(a) for a in arguments]
        args += [f"{k}={self.argument(v)}" for k, v in node.kwargs.items()]
        if way.keyword is not None:
            args.append(f"{way.keyword}={self.argument(node.args[way.argument])}")
        return f"{_spelled(way.target)}({', '.join(args)})"

    def argument(self, value: Any) -> str:
        """The expression of an argument."""
        if isinstance(value, fx.Node):
            return self.value(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.argument(v) for v in value)}]"
        return literal(value)


def block_text(program: Program, block: Block) -> str:
    """A block in a stable text form: equal for identical blocks.

    Operations with their arguments, shapes, dtypes, strides and wiring, under local names; the
    names of the model's own modules are left out.
    """
    names = BlockNames(program, block, block.c)
    expressions = Expressions(program, names)
    graph = block.graph
    lines = []
    for k, j in enumerate(block.d):
        value = program.owner[j].meta["val"]
        shape = f"{_dtype(value)}{list(value.shape)} strides {list(value.stride())}" \
            if isinstance(value, torch.Tensor) else "?"
        lines.append(f"{names.of(j)}: {graph.d[k].kind} {graph.d[k].size} bytes, {shape}")
    for i in block.c:
        left = ", ".join(names.of(j) for j in program.cd.c[i].outputs)
        lines.append(f"{left} = {expressions.call(program.operation[i])}")
    for number, (source, name) in enumerate(expressions.sources.items()):
        value = next(n for n, s in program.joint.sources.items() if s == source).meta["val"]
        lines.append(f"{name}: {source.kind} {_dtype(value)}{list(value.shape)} {list(value.stride())}")
        lines = [re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", f"${number}", line) for line in lines]
    lines.append(f"loss before {graph.loss}; {graph.inputs} {graph.outputs} {graph.output_grads} "
                 f"{graph.input_grads} {sorted(graph.releases.items())}")
    return "\n".join(lines)


def _dtype(value: torch.Tensor) -> str:
    return f"{value.device}:{str(value.dtype).removeprefix('torch.')}"


def classes_of(texts: Sequence[str]) -> tuple[int, ...]:
    """Class number of each block: identical blocks have the same (Rockmate, appendix A.5)."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(t, len(numbers)) for t in texts)
