"""Find identical blocks: a text of each block, and classes of equal texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from rkmate import device as devices
from rkmate.graph.blocks.expressions import Expressions, NameTable, local_names
from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Block
from rkmate.graph.capture.capture import Source
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, kind_of
from rkmate.graph.passes.functions import OwnFunction
from rkmate.torch_seam.nodes import VALUE

_INDEX = re.compile(r'((?:torch\.device\(|device=)"[a-z]+):\d+(?=")')
"""The device that an operation, or a tile, names for a new tensor."""


def block_text(program: Program, block: Block) -> str:
    """Return a block in a stable text form: equal for identical blocks.

    Operations with their arguments, shapes, dtypes, strides and wiring, under local names; the
    names of the model's own modules are left out. So is which of several devices of a kind they are on: a
    plan is for one, and serves any.
    """
    naming = _Naming(local_names(program, block, block.c, NameTable()))
    expressions = Expressions(program, naming)
    graph = block.graph
    lines = []
    for k, j in enumerate(block.d):
        value = program.owner[j].meta[VALUE]
        shape = f"{_dtype(value)}{list(value.shape)} strides {list(value.stride())}" \
            if isinstance(value, torch.Tensor) else "?"
        lines.append(f"{naming.value(j)}: {graph.d[k].kind} {graph.d[k].size} bytes, {shape}")
    for i in block.c:
        left = ", ".join(naming.value(j) for j in program.cd.c[i].outputs)
        node = program.operation[i]
        call = expressions.call(node)
        if node.target in (FORWARD, BACKWARD):
            call = call.replace(repr(node.args[0]), kind_of(str(node.args[0])), 1)
        lines.append(f"{left} = {call}")
    first = {s: n for n, s in reversed(program.joint.sources.items())}
    for source, name in naming.sources.items():
        value = first[source].meta[VALUE]
        lines.append(f"{name}: {source.kind} {_dtype(value)}{list(value.shape)} {list(value.stride())}")
    lines.append(f"loss before {graph.loss}; {graph.inputs} {graph.outputs} {graph.output_grads} "
                 f"{graph.input_grads} {sorted(graph.releases.items())}")
    return _INDEX.sub(r"\1", "\n".join(lines))


def classes_of(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the class number of each block: identical blocks have equal numbers (Rockmate, appendix A.5)."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(t, len(numbers)) for t in texts)


class _Naming:
    """Values by what they are, what the caller holds by the order in which it is read."""

    def __init__(self, local: dict[int, str]) -> None:
        self.local = local
        self.sources: dict[Source, str] = {}

    def value(self, j: int) -> str:
        return self.local[j]

    def source(self, source: Source) -> str:
        return self.sources.setdefault(source, f"${len(self.sources)}")

    def namespace(self, name: str) -> str:
        return name

    def function(self, tiled: OwnFunction) -> str:
        return f"<{tiled.text}>"


def _dtype(value: torch.Tensor) -> str:
    return f"{devices.of(value).autocast_kind}:{str(value.dtype).removeprefix('torch.')}"
