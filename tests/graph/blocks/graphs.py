"""CD graphs by hand, and programs around them without a capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.blocks.lower import Program
from rkmate.graph.capture.captured import Source
from rkmate.ir.cd import CDGraph
from tests.planners.problems import training_graph


def trained(reads: Sequence[Sequence[int]], sizes: Sequence[int] | None = None,
            needs_output: Sequence[bool] | None = None) -> CDGraph:
    """`training_graph` with one byte (or `sizes`) for each value, and nothing saved."""
    n = len(reads)
    return training_graph(reads, sizes or [1] * n, [1] * n, [0] * n, [0] * n, needs_output or [False] * n)


def chain(n: int) -> list[list[int]]:
    """Reads of nodes in a row."""
    return [[]] + [[i] for i in range(n - 1)]


def origins(cd: CDGraph) -> list[int | None]:
    """Of `training_graph`: the last forward node has the first backward node."""
    return [None] * cd.loss + [2 * cd.loss - 1 - i for i in cd.backward]


@st.composite
def settings(draw: st.DrawFn) -> CutSettings:
    """Any that can be met: a piece that is too long can be cut in two."""
    least = draw(st.integers(1, 5))
    return CutSettings(least, draw(st.integers(2 * least - 1, 14)))


def node(path: str = "", number: int | None = None, reads: Sequence[Any] = (), **meta: Any) -> Any:
    """Stands for a torch operation: a module's path, autograd's sequence number, and values that it reads."""
    if path:
        meta["nn_module_stack"] = {"0": ("", object), "1": (path, object)}
    if number is not None:
        meta["seq_nr"] = number
    return SimpleNamespace(meta=meta, target=None, all_input_nodes=reads)


class Value:
    """Stands for a value: a parameter, or its gradient."""


def program_of(cd: CDGraph, *, paths: Mapping[int, str] | None = None, constant: Sequence[int] = (),
               of_one_parameter: Sequence[Sequence[int]] = (),
               reads: Mapping[int, int] | None = None) -> Program:
    """A program around a graph of `training_graph`: only what the cutting reads.

    `paths`: of C nodes. `of_one_parameter`: D nodes in `releases` that are gradients of one parameter.
    `reads`: of C nodes, the D node that is the gradient of the parameter that they read.
    """
    shared = {j: k for k, js in enumerate(of_one_parameter) for j in js}
    grads = {j: Value() for j in cd.releases}
    sources = {j: Source("param", f"shared {shared[j]}" if j in shared else f"w{j}") for j in grads}
    parameters = {i: Value() for i in reads or {}}
    number = [i if i < cd.loss else o for i, o in enumerate(origins(cd))]
    return Program(
        None, cd, tuple(node((paths or {}).get(i, ""), number[i],  # type: ignore[arg-type]
                             [parameters[i]] if i in parameters else ()) for i in range(len(cd.c))),
        (), (), {**{g: j for j, g in grads.items()},  # type: ignore[dict-item]
                 **{parameters[i]: sources[j] for i, j in (reads or {}).items()}},
        tuple((sources[j], grads[j])  # type: ignore[misc]
              for j in sorted(grads, key=lambda j: cd.producer[j] or 0)),
        (), frozenset(constant), (), cd.outputs, {}, {})
