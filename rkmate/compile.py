"""`torch.compile(model, backend="rkmate", options={"budget": "600MiB"})`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rkmate.api import wrap
from rkmate.budget import Budget, parse_budget
from rkmate.errors import ArgumentError
from rkmate.parts.several_graphs import EachAlone, SeveralGraphs, StepGraph
from rkmate.runtime.module import PlannedModule
from rkmate.settings import OPTIONS, check_no_settings_of_wrap, chosen


def backend(graph: torch.fx.GraphModule, examples: Sequence[Any], *,
            options: Mapping[str, Any] | None = None, **ignored: Any) -> Callable[..., Any]:
    """Plan each graph that Dynamo captures, when it is first called with gradients.

    All graphs whose forwards run before one backward share the budget, from the second step on; with a
    limit of ``offload``, or ``budget="auto"``, each has it for itself, and a warning says so. Dynamo hands
    the parameters over as inputs, so their gradients leave together at the end of the graph's backward.

    Args:
        graph, examples: from Dynamo.
        options: ``budget`` (needed), and `rkmate.Options` (``calls``, ``compile``, ``offload``, ``settings``,
            ``progress``), as for `rkmate.wrap`; no progress is shown by default. The outputs of a graph have
            numbers and no names.

    Raises:
        UnknownOption: an option is unknown.
        ArgumentError: the budget is missing, a value is wrong, or the shapes are dynamic.
    """
    rest = {"progress": False, **(options or {})}
    if "budget" not in rest:
        raise ArgumentError(f"the rkmate backend needs the option budget; other options are "
                            f"{', '.join(OPTIONS)}. Given: {', '.join(sorted(options or {})) or 'none'}")
    budget = rest.pop("budget")
    call = chosen(rest, backend, own=("budget",), name="the rkmate backend")
    check_no_settings_of_wrap(call.settings, "the rkmate backend")
    if any(isinstance(e, (torch.SymInt, int)) for e in examples):
        raise ArgumentError("the rkmate backend plans fixed shapes: compile with dynamic=False")
    _ = graph.code                  # Dynamo's graphs write their forward when it is first needed
    offload = call.settings.offload
    alone = [name for name, given in (
        ("a limit of offload", offload is not None and offload.most_bytes is not None),
        ('budget="auto"', budget == "auto")) if given]
    step = _steps.get(id(options))
    if step is None:
        step = _steps[id(options)] = EachAlone(alone, options) if alone else \
            SeveralGraphs(parse_budget(budget), call.settings, options)
    return _Planned(graph, {"budget": budget, **call.options()}, step)


class _Planned(StepGraph):
    """A captured graph, planned at the first call that records gradients."""

    def __init__(self, graph: nn.Module, options: Mapping[str, Any],
                 step: SeveralGraphs | EachAlone) -> None:
        super().__init__(graph)
        self._options, self._step = options, step
        step.add(self)

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled() or not any(
                isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return self.graph(*inputs)
        self._step.begins(self, inputs)
        if self.module is None:
            self.module = self._planned(inputs)
        return self.module(*inputs)

    def _planned(self, inputs: Sequence[Any]) -> PlannedModule:
        """Plan for a call. A graph of the same parameters that was planned before, for other shapes, leaves
        this one as many bytes as it had."""
        budget = self._options["budget"]
        weight = next((t for t in inputs if isinstance(t, nn.Parameter)), None)
        if weight is None or budget == "auto":
            return wrap(self.graph, inputs, **self._options)
        key = id(weight), budget
        if key not in _planned_before:
            _planned_before[key] = parse_budget(budget)
            weakref.finalize(weight, _planned_before.pop, key, None)
        module = wrap(self.graph, inputs, **{**self._options, "budget": _planned_before[key]})
        _planned_before[key] = _planned_before[key].at_least(module.plan.budget_bytes)
        return module


_planned_before: dict[tuple[int, Any], Budget] = {}
"""By the first parameter of a graph and the budget that the user gave: the budget of later plans."""


_steps: weakref.WeakValueDictionary[int, SeveralGraphs | EachAlone] = weakref.WeakValueDictionary()
"""By the id of the options of a ``torch.compile``: its graphs, which keep the options."""
