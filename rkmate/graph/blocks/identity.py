"""Find identical blocks: a text of each block, and classes of equal texts."""

from __future__ import annotations

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
from rkmate.torch_seam.nodes import VALUE


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
