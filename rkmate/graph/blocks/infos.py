"""Describe each block for a plan: its class, and the module that it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from rkmate.graph.blocks.partition import Partition
from rkmate.ir.plan import BlockInfo
from rkmate.torch_seam.nodes import module_stack


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
