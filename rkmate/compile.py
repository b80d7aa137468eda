"""`torch.compile(model, backend="rkmate", options={"budget": "600MiB"})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.runtime.module import PlannedModule

_OPTIONS = ("budget", "planner", "costs", "on_new_shape", "trains", "verify", "offload", "offload_bytes")


def backend(graph: torch.fx.GraphModule, examples: Sequence[Any], *,
            options: Mapping[str, Any] | None = None, **ignored: Any) -> Callable[..., Any]:
    """Plans each graph that Dynamo captures, when it is first called with gradients.

    The budget holds for each graph by itself, and so does what it may send away at once. Dynamo hands the
    parameters over as inputs, so their gradients leave together at the end of the graph's backward.

    Args:
        graph, examples: from Dynamo.
        options: ``budget`` (needed), ``planner``, ``costs``, ``on_new_shape``, ``trains``, ``verify``,
            ``offload``, ``offload_bytes``: as of `rkmate.wrap`. The outputs of a graph have numbers and no
            names.

    Raises:
        ArgumentError: an option is missing or unknown, or the shapes are dynamic.
    """
    chosen = dict(options or {})
    unknown = sorted(set(chosen) - set(_OPTIONS))
    if unknown or "budget" not in chosen:
        raise ArgumentError(f"options of the rkmate backend are {', '.join(_OPTIONS)}, of which budget "
                            f"is needed; given were {', '.join(sorted(chosen)) or 'none'}")
    if any(isinstance(e, (torch.SymInt, int)) for e in examples):
        raise ArgumentError("the rkmate backend plans fixed shapes: compile with dynamic=False")
    return _Planned(graph, chosen)


class _Planned:
    """One captured graph: planned at the first call that records gradients."""

    def __init__(self, graph: nn.Module, options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._options = options
        self._module: PlannedModule | None = None

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled() or not any(
                isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return self._graph(*inputs)
        if self._module is None:
            from rkmate.public import wrap

            self._module = wrap(self._graph, inputs, progress=False, **self._options)
        return self._module(*inputs)
