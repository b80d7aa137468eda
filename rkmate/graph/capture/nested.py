"""Nested graphs of an exported forward: what stands inside of an autocast or no-grad region.

Their operations know which module they come from, and which checkpointed region. A joint trace calls such a
graph as one function, and its operations would carry what is known of the whole region.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import fx


def traced_node_by_node(program: fx.GraphModule) -> None:
    """Let the graphs inside of an exported program run as the program itself is run."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule) and module is not program:
            module.forward = MethodType(_run, module)


def _run(graph: fx.GraphModule, *args: Any) -> Any:
    return fx.Interpreter(graph, garbage_collect_values=False).run(*args)
