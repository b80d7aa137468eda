"""Find identical blocks (a text of each block, and classes of equal texts), and describe each block for a
plan: its class, and the module that it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.blocks.expressions import Expressions, local_names
from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Block, Partition
from rkmate.graph.capture.captured import Source
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, kind_of
from rkmate.graph.ops.collectives import is_collective, spread_of
from rkmate.ir.calls import Constant, Defined, Name, NameTable, Operator, Writer, in_full
from rkmate.ir.plan import BlockInfo
from rkmate.torch_seam.nodes import VALUE, module_stack


def _callee(target: Operator | Defined) -> str:
    return in_full(target) if isinstance(target, Operator) else f"<{target.function(target.name, _WRITE)}>"


_WRITE = Writer(_callee, lambda device: device.partition(":")[0])
"""Writes own functions in whole, and devices without their number."""


def block_texts(parts: Partition) -> tuple[str, ...]:
    """Return each block in a stable text form: equal for identical blocks.

    Operations with their arguments, shapes, dtypes, strides and wiring, under local names; the
    names of the model's own modules are left out, and those of process groups. So is which of several
    devices of a kind they are on: a plan is for one, and serves any.
    """
    sources = {s: n for n, s in reversed(parts.program.joint.sources.items())}
    return tuple([_text(parts.program, block, sources) for block in parts.blocks])


def _text(program: Program, block: Block, sources: Mapping[Source, fx.Node]) -> str:
    naming = _Naming(local_names(program, block, block.c, NameTable()))
    expressions = Expressions(program, naming)
    graph = block.graph
    lines = []
    for k, j in enumerate(block.d):
        value = program.owner[j].meta[VALUE]
        shape = f"{_dtype(value)}{list(value.shape)} strides {list(value.stride())}" \
            if isinstance(value, torch.Tensor) else "?"
        lines.append(f"{naming.local[j]}: {graph.d[k].kind} {graph.d[k].size} bytes, {shape}")
    for i in block.c:
        left = ", ".join(naming.local[j] for j in program.cd.c[i].outputs)
        node = program.operation[i]
        call = expressions.call(node)
        if node.target in (FORWARD, BACKWARD):
            call = replace(call, args=(Constant(kind_of(str(node.args[0]))), *call.args[1:]))
        elif is_collective(node.target):
            call = replace(call, args=(*call.args[:-1], Constant(spread_of(str(node.args[-1])))))
        lines.append(f"{left} = {_WRITE(call)}")
    for source, name in naming.sources.items():
        value = sources[source].meta[VALUE]
        lines.append(f"{name}: {source.kind} {_dtype(value)}{list(value.shape)} {list(value.stride())}")
    lines.append(f"loss before {graph.loss}; {graph.inputs} {graph.outputs} {graph.output_grads} "
                 f"{graph.input_grads} {sorted(graph.releases.items())}")
    return "\n".join(lines)


def classes_of(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the class number of each block: identical blocks have the same (Rockmate, appendix A.5)."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(t, len(numbers)) for t in texts)


class _Naming:
    """Values by what they are, what the caller holds by the order in which it is read."""

    def __init__(self, local: dict[int, str]) -> None:
        self.local = local
        self.sources: dict[Source, str] = {}

    def value(self, j: int) -> Name:
        return Name(self.local[j])

    def source(self, source: Source) -> Name:
        return Name(self.sources.setdefault(source, f"${len(self.sources)}"))


def _dtype(value: torch.Tensor) -> str:
    return f"{devices.of(value).autocast_kind}:{str(value.dtype).removeprefix('torch.')}"


# -- What a plan says of blocks --------------------------------------------------------------------


def block_infos(parts: Partition, classes: Sequence[int]) -> tuple[BlockInfo, ...]:
    """Return a description of each block. `classes`: equal numbers for identical blocks."""
    infos = []
    of = Modules()
    for block, k in zip(parts.blocks, classes, strict=True):
        paths: Counter[str] = Counter()
        for i in block.c[:block.graph.loss]:
            paths[of(parts.program.operation[i])] += 1
        named = [p.split(".") for p in paths if p]
        common: list[str] = []
        for column in zip(*named, strict=False):
            if len(set(column)) > 1:
                break
            common.append(column[0])
        path = ".".join(common) or (paths.most_common(1)[0][0] if paths else "")
        loss = block.graph.loss
        infos.append(BlockInfo(_label(k), path, loss, len(block.c) - loss, 0))
    return tuple(infos)


def _label(number: int) -> str:
    """Return the label with this number: A, B, ..., Z, AA, AB, ..."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(65 + rest) + text
    return text


class Modules:
    """`module_of`, for the nodes of graphs that live as long as it is used: those of one module share what
    says so."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def __call__(self, node: torch.fx.Node) -> str:
        stack = module_stack(node)
        known = self._known.get(id(stack))
        if known is None:
            known = self._known[id(stack)] = module_of(node)
        return known


def module_of(node: torch.fx.Node) -> str:
    """Return the path of the module of the user's model that an operation comes from; of a backward
    operation, that of the forward operation that it was derived from."""
    stack = module_stack(node) or {}
    path = next((str(p) for p, _ in reversed(list(stack.values())) if p), "")
    return path.removeprefix("model.") if path != "model" else ""       # the tracer's own wrapping
