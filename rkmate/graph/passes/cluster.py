"""A group of operations as the target of one node: its text, and its calls."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rkmate.device.inductor import Fused, form_of, fused
from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes.node_calls import OwnFunction, call_of
from rkmate.ir.calls import Writer, in_full
from rkmate.support.generated import load
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import OpOverload, operator_name

aten = torch.ops.aten
MOST_WORDS = 3
"""Operations that a name tells."""


@dataclass(frozen=True, eq=False)
class Cluster(OwnFunction):
    """Operations that are compiled into one function with several results, each in a storage of its own.

    Calling it runs the compiled function, which is compiled before its first call.
    """

    graph: fx.Graph
    """Arguments come in, and the results leave as a tuple. Its values are fake ones."""

    prefix = "fused"
    imports = ("from rkmate.device.inductor import fused", "aten = torch.ops.aten")

    @functools.cached_property
    def name(self) -> str:  # type: ignore[override]
        """The first of its operations, without an underscore before or after."""
        words = dict.fromkeys(self.operations)
        return "_".join(list(words)[:MOST_WORDS])

    @functools.cached_property
    def operations(self) -> tuple[str, ...]:
        """The names of its operations, in order; views are none."""
        return tuple(operator_name(n.target).strip("_") for n in self.graph.nodes
                     if isinstance(n.target, OpOverload) and not is_view(n))

    @functools.cached_property
    def text(self) -> str:
        """The generated function under its own name; equal for equal computations."""
        return self.function(self.name)

    def function(self, name: str, write: Writer = Writer()) -> str:
        """Return the generated function under another name: a decorator that has it compiled, and its
        operations, named in full: equal groups have equal code."""
        write = replace(write, callee=in_full)
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        forms = ",\n       ".join(repr(form_of(n.meta[VALUE])).replace("'", '"') for n in inputs)
        lines = [f"@fused({forms})", f"def {name}({', '.join(n.name for n in inputs)}):",
                 f'    """{len(self.operations)} operations, compiled as one."""']
        for node in self.graph.nodes:
            if node.op == "call_function":
                lines.append(f"    {node.name} = {write(call_of(node.target, node.args, node.kwargs))}")
        results: Any = self.graph.output_node().args[0]
        lines.append(f"    return ({', '.join(n.name for n in results)},)")
        return "\n".join(lines) + "\n"

    def values(self) -> tuple[torch.Tensor, ...]:
        results: Any = self.graph.output_node().args[0]
        return tuple(n.meta[VALUE] for n in results)

    def compile(self) -> None:
        """Compile it, where it was not compiled before. Raises `CompilerError`."""
        self._compiled.compile()

    @functools.cached_property
    def _compiled(self) -> Fused:
        return _made(self.text, self.name, torch.get_num_threads(), torch.get_default_dtype())

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return self._compiled(*args)

    def __repr__(self) -> str:
        return f"{self.name}({len(self.operations)} operations)"


@functools.lru_cache(maxsize=256)
def _made(text: str, name: str, threads: int, default: torch.dtype) -> Fused:
    made: Fused = load(text, f"<{name}>", {"torch": torch, "aten": torch.ops.aten, "fused": fused})[name]
    return made
