"""A region of the joint graph as one computation: the operations on one tile, and the combination of the
tiles; and the kernels of an operation that works part by part, of fewer and larger parts."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.repairs import retrace
from rkmate.graph.ops.norms import BATCH_NORM_BACKWARD
from rkmate.graph.passes.node_calls import OwnFunction
from rkmate.graph.passes.tiles.source import (
    Give,
    Result,
    add_product,
    new_tensor,
    peak_bytes,
    products_of,
    statement,
    steps_of,
)
from rkmate.ir.calls import Writer
from rkmate.support.generated import load
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


class InTiles(OwnFunction):
    """Operations that run tile by tile, as one node with several results."""

    parts: int
    """The number of tiles."""
    gives: tuple[Result, ...]
    """The results."""

    @abstractmethod
    def graphs(self) -> Iterator[tuple[fx.Graph, int]]:
        """Yield the operations of each kind of tile, and how many such tiles there are."""

    @abstractmethod
    def fewer(self, factor: int) -> InTiles | None:
        """Return the computation in fewer tiles by a factor; None where there are no fewer."""

    @abstractmethod
    def tile_bytes(self, inside: Callable[[fx.Node], int]) -> int:
        """Return the most bytes in addition to the results: of one tile, and of sums in another type than
        their result's. `inside`: the temporaries of an operation of a tile."""

    def sum_bytes(self, *, apart: bool = False) -> int:
        """Return the bytes of the sums. `apart`: only of sums in another type than their result's."""
        return sum(math.prod(g.shape) * g.sums_in.itemsize for g in self.gives
                   if g.is_sum and (not apart or g.sums_in != g.dtype))

    def values(self) -> tuple[torch.Tensor, ...]:
        """Return tensors like the results."""
        return tuple(torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in self.gives)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = _compiled(self.text, self.name)(*args, **kwargs)
        return result


@dataclass(frozen=True, eq=False)
class Tiled(InTiles):
    """Operations that run a few rows at a time, as the target of one node with several results.

    Two of equal text are equal. Calling one runs the source that a generated step shows.
    """

    name: str
    """Name of the generated function, without its number."""
    graph: fx.Graph
    """Graph of one tile: the number of rows and the arguments come in, the results leave. Its values are
    those of a full tile."""
    rows: int
    parts: int
    takes: tuple[int, ...]
    """Per argument, how many leading dimensions are rows; 0: every tile reads the whole."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the arguments."""
    gives: tuple[Give, ...]
    into: tuple[int, ...] = ()
    """Results, of those that are summed up, whose first value comes in as an argument, after the others, and
    is overwritten."""

    prefix = "tiled"

    @property
    def step(self) -> int:
        """Rows of a tile; the last one may have fewer."""
        return -(-self.rows // self.parts)

    def function(self, name: str, write: Writer = Writer()) -> str:
        """Return the generated function under another name. `write`: what its operations are written with."""
        return _function(self, name, write)

    def with_parts(self, parts: int) -> Tiled:
        """Return the computation in `parts` parts."""
        parts = min(max(1, parts), self.rows)
        return replace(self, graph=_at_rows(self, -(-self.rows // parts)), parts=parts)

    def graphs(self) -> Iterator[tuple[fx.Graph, int]]:
        """Yield the operations of a tile, and the number of tiles."""
        yield self.graph, self.parts

    def fewer(self, factor: int) -> Tiled | None:
        """Return the computation in fewer tiles by a factor, two at least; None if it runs in two."""
        return self.with_parts(max(2, self.parts // factor)) if self.parts > 2 else None

    def with_into(self, into: Sequence[int]) -> Tiled:
        """Return the computation that adds some sums to arguments, in place."""
        if any(self.gives[k].lead for k in into):
            raise ValueError("a result that is put together by rows has no first value")
        return replace(self, into=tuple(into))

    def tile_bytes(self, inside: Callable[[fx.Node], int]) -> int:
        """Return the most bytes in addition to the results: of one tile, and of sums in another type than
        their result's. `inside`: the temporaries of an operation of a tile."""
        return peak_bytes(self.graph, self.gives, inside) + self.sum_bytes(apart=True)

    def __repr__(self) -> str:
        return f"{self.name}({self.rows} rows in {self.parts} parts)"


def propagate(graph: fx.Graph) -> None:
    """Give each operation of a tile's graph the value that its arguments' values make, with the strides that
    its kernel returns: they decide what may be overwritten."""
    def run() -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
                node.meta[VALUE] = node.target(*args, **kwargs)

    retrace(run)


def _at_rows(tiled: Tiled, step: int) -> fx.Graph:
    """Return a tile's graph with the values of another number of rows."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in tiled.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    like = next(n.meta[VALUE] for n in inputs[1:])
    with like.fake_mode:
        inputs[0].meta[VALUE] = step
        for node, lead in zip(inputs[1:], tiled.takes, strict=True):
            value = node.meta[VALUE]
            if lead:
                node.meta[VALUE] = torch.empty((step, *value.shape[1:]), dtype=value.dtype,
                                               device=value.device)
        propagate(graph)
    return graph


@functools.lru_cache(maxsize=256)
def _compiled(text: str, name: str) -> Callable[..., Any]:
    made: Callable[..., Any] = load(
        text, f"<{name}>", {"torch": torch, "aten": torch.ops.aten, "rkmate": torch.ops.rkmate})[name]
    return made


# -- The generated function ------------------------------------------------------------------------


def _function(tiled: Tiled, name: str, write: Writer) -> str:
    """Return the function's text."""
    inputs = [n for n in tiled.graph.nodes if n.op == "placeholder"][1:]
    output: Any = tiled.graph.output_node().args[0]
    results = [f"result_{k}" for k in range(len(output))]
    given = [f"all_{n.name}" if lead else n.name for n, lead in zip(inputs, tiled.takes, strict=True)]
    given += [f"into_{k}" for k in tiled.into]
    lines = [f"def {name}({', '.join(given)}):",
             f'    """{tiled.rows} rows, {tiled.step} at a time."""']
    for node, lead, shape in zip(inputs, tiled.takes, tiled.shapes, strict=True):
        if lead > 1:
            lines.append(f"    all_{node.name} = all_{node.name}.reshape("
                         f"{[tiled.rows, *shape[lead:]]})")
    fused = products_of(tiled.graph, tiled.gives)
    lines += [f"    {_start(tiled, k, give, write, fused=k in fused)}" for k, give in enumerate(tiled.gives)]
    body = [f"n = min({tiled.step}, {tiled.rows} - at)"] if tiled.rows % tiled.step \
        else [f"n = {tiled.step}"]
    body += [f"{node.name} = all_{node.name}.narrow(0, at, n)"
             for node, lead in zip(inputs, tiled.takes, strict=True) if lead]
    for step in steps_of(tiled.graph):
        k = next((k for k in fused if fused[k] is step.node), None)
        # A product's first tile writes; what stood there is not read.
        first = "" if k in tiled.into else ", beta=int(at > 0)"
        body.append(statement(step, write) if k is None else add_product(
            results[k], step.node, write, first))
        done = [k for k, n in enumerate(output) if n is step.node and k not in fused]
        body += [_collect(results[k], n, tiled.gives[k]) for k in done for n in [output[k]]]
        ends = [n.name for n in step.ends if n not in fused.values()]
        body += [f"del {', '.join(ends)}"] if ends else []
    lines.append(f"    for at in range(0, {tiled.rows}, {tiled.step}):")
    lines += [f"        {line}" for line in body]
    lines.append(f"    return ({', '.join(_end(tiled, k, give) for k, give in enumerate(tiled.gives))},)")
    return "\n".join(lines) + "\n"


def _start(tiled: Tiled, k: int, give: Give, write: Writer, *, fused: bool) -> str:
    name = f"result_{k}"
    if give.lead:
        return f"{name} = {new_tensor('empty', _by_rows(tiled, give), give.dtype, give.device, write)}"
    if k in tiled.into and give.sums_in == give.dtype:
        return f"{name} = into_{k}"
    # A product's first tile writes; what stood there is not read.
    kind = "empty" if fused and k not in tiled.into else "zeros"
    return f"{name} = {new_tensor(kind, list(give.shape), give.sums_in, give.device, write)}"


def _by_rows(tiled: Tiled, give: Give) -> list[int]:
    return [tiled.rows, *give.shape[give.lead:]]


def _collect(name: str, node: fx.Node, give: Give) -> str:
    return f"{name}.narrow(0, at, n).copy_({node.name})" if give.lead else f"{name}.add_({node.name})"


def _end(tiled: Tiled, k: int, give: Give) -> str:
    name = f"result_{k}"
    if give.lead:
        return name if give.lead == 1 else f"{name}.view({list(give.shape)})"
    if give.sums_in == give.dtype:
        return name
    if k in tiled.into:
        return f"into_{k}.add_({name})"
    return f"{name}.to({give.dtype})"


# -- Fewer and larger parts ------------------------------------------------------------------------
#
# The graph contains the variant that needs the least memory. The kernel is chosen at each step of a schedule,
# where the free memory is known (`rkmate.ir.kernels`).


@dataclass(frozen=True)
class Alternative:
    """Another kernel of an operation that works part by part: fewer and larger parts, more memory."""

    target: Any
    """The operator."""
    args: tuple[Any, ...]
    overhead: int
    """Bytes of temporary memory, at most."""


def _whole_batch_norm(node: fx.Node) -> tuple[Alternative, ...]:
    """Return torch's call for the gradients of a batch norm, with the same bits: it allocates the first of
    them twice, and overwrites nothing."""
    grad, input, weight, mean, invstd, eps = node.args
    value = input.meta[VALUE]  # type: ignore[union-attr]
    return (Alternative(aten.native_batch_norm_backward.default,
                        (grad, input, weight, None, None, mean, invstd, True, eps, [True] * 3),
                        value.numel() * value.element_size()),)


FEWER = 4
"""Factor between the parts of one alternative and the next: a useful difference."""


def alternatives(node: fx.Node) -> tuple[Alternative, ...]:
    """Return the other kernels of an operation, the smallest memory first; none if it has only one. The parts
    of a plain cross entropy are as fast as torch's kernel."""
    if isinstance(node.target, InTiles):
        return _of_tiles(node, node.target)
    return _whole_batch_norm(node) if node.target is BATCH_NORM_BACKWARD else ()


def _of_tiles(node: fx.Node, tiled: InTiles) -> tuple[Alternative, ...]:
    """Return the operation in fewer tiles."""
    found: list[InTiles] = []
    with node.all_input_nodes[0].meta[VALUE].fake_mode:
        while (fewer := (found[-1] if found else tiled).fewer(FEWER)) is not None:
            found.append(fewer)
    return tuple(Alternative(t, node.args, t.tile_bytes(lambda n: 0)) for t in found)
