"""`torch.compile(model, backend="rkmate", options={"budget": "600MiB"})`.

Dynamo breaks a forward into several graphs where it cannot go on, and for the buckets of
DistributedDataParallel. All graphs whose forwards run before one backward share the budget: while a graph
runs, those before it hold what they have saved, and those after it have left gradients of parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rkmate.api import wrap
from rkmate.budget import Budget, parse_budget
from rkmate.errors import ArgumentError
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.parts.moments import room_for
from rkmate.parts.one_budget import OneBudget, Part, Rest, undisturbed
from rkmate.pipeline.part_plans import ways_of
from rkmate.pipeline.prepare import Blocked, estimated, reserve_for_loss, trace
from rkmate.pipeline.settings import Settings
from rkmate.planners.several_calls import Item, Moment
from rkmate.runtime.guards import ModuleReader, guards_of
from rkmate.runtime.kept_plans import Planning, Prototype
from rkmate.runtime.module import PlannedModule
from rkmate.settings import OPTIONS, check_no_settings_of_wrap, chosen
from rkmate.support.progress import Progress
from rkmate.support.warn import warn

logger = logging.getLogger("rkmate")


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
    return _Graph(graph, {"budget": budget, **call.options()}, step)


class _Graph:
    """A graph of a step that Dynamo has captured, planned at the first call that records gradients."""

    def __init__(self, graph: nn.Module, options: Mapping[str, Any],
                 step: SeveralGraphs | EachAlone) -> None:
        self.graph, self._options, self._step = graph, options, step
        self.module: PlannedModule | None = None
        """The graph with its plan, once it was called."""
        self.part: Part | None = None
        """The graph's schedules, once it was seen in a step with others."""
        self.gradients = 0
        """Bytes of the gradients of its parameters."""
        self.loss = 0
        """Bytes for a loss of its outputs."""
        step.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the backward of a call has not come to its end."""
        return self.module is not None and bool(self.module._plans.open_calls.now())

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


class EachAlone:
    """The graphs of one ``torch.compile`` with options for which they cannot share a budget."""

    def __init__(self, why: Sequence[str], options: Any) -> None:
        """`why`: the names of these options. `options`: all of that ``torch.compile``, by whose identity its
        graphs know each other."""
        self._why, self._options = " and ".join(why), options
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._told = False

    def add(self, graph: _Graph) -> None:
        """Add a graph that Dynamo has made."""
        self._graphs.add(graph)

    def begins(self, graph: _Graph, inputs: tuple[Any, ...]) -> None:
        """Note that a graph is called, and warn, once, if another one has not had its backward."""
        held = [g.module.plan for g in self._graphs if g is not graph and g.module is not None and g.is_open]
        if held and not self._told:
            self._told = True
            warn(f"torch.compile has broken a step into several graphs, and with {self._why} each of them "
                 f"has the whole budget: while one runs within {held[0].budget_bytes:,} bytes, those before "
                 f"it hold up to {sum(p.peak_bytes for p in held):,} more. Leave {self._why} out, and all "
                 "graphs share the budget; or take one plan for all of the model (rkmate.wrap)")


class SeveralGraphs(OneBudget):
    """The graphs of one ``torch.compile``.

    The first graph of a step has a plan for the whole budget, unless others are known that were not called
    yet. Further ones hold as little as they can until the step is over; then all share the budget.
    """

    _too_large = ("torch.compile has broken a step into several graphs, and no plans of them keep it within "
                  "{budget:,} bytes: the smallest budget that can be met is {least:,} bytes ({share:.0%} of "
                  "the step's own peak of about {plain:,} bytes). One plan for all of the model "
                  "(rkmate.wrap, also inside of DistributedDataParallel) may need less")

    def __init__(self, budget: Budget, settings: Settings, options: Any) -> None:
        """`options`: of that ``torch.compile``, by whose identity its graphs know each other."""
        super().__init__(nn.Module(), Planning(budget, settings.planner_name, settings, False))
        self._loss, self._options = settings.loss_bytes, options
        self._calls = settings.calls
        """Calls of one graph that its own plan is for."""
        self._uncalled: weakref.WeakSet[_Graph] = weakref.WeakSet()
        """Graphs that have not been called yet: DistributedDataParallel makes all of a step's at once."""
        self._now: list[_Graph] = []
        """The graphs that were called in this step."""
        self._known: list[tuple[_Graph, ...]] = []
        """The graphs of each step with several of them."""
        self._is_shared = True

    def add(self, graph: _Graph) -> None:
        """Add a graph that Dynamo has made."""
        self._uncalled.add(graph)

    def begins(self, graph: _Graph, inputs: tuple[Any, ...]) -> None:
        """Note that a graph is called. Raises `InfeasibleBudget`."""
        if not any(g.is_open for g in self._now):
            found = tuple(self._now)
            of_one_plan = self._calls if len(set(found)) == 1 else 1
            if len(found) > of_one_plan and found not in self._known:
                self._known.append(found)
                self._is_shared = False
            self._now = []
        self._uncalled.discard(graph)
        if graph.part is None and (
                any(g is not graph for g in self._now) or (graph.module is None and self._uncalled)
                or any(graph in known for known in self._known)):
            self._look_at(graph, inputs)
        if graph.module is None and graph.part is not None:
            self._follow(graph, graph.part.example)
        if not self._is_shared and not self._now:
            self._share()
        self._now.append(graph)

    def _look_at(self, graph: _Graph, inputs: tuple[Any, ...]) -> None:
        """Look for the schedules that a graph may follow."""
        def limit(blocked: Blocked) -> int:
            return max(1, self.planning.budget.of(estimated(blocked).baseline_peak))

        with undisturbed():
            refuse_what_cannot_repeat(graph.graph, inputs, {})
            key = guards_of(ModuleReader(graph.graph), inputs, {})[0]
            traced = trace(graph.graph, inputs, {}, self.planning.settings, Progress(False))
            ways = ways_of(traced, self.planning.planner, limit, 0.0)
        graph.part = Part(graph.graph, key, replace(traced, tensors={}), [ways])
        graph.gradients = sum(t.nbytes for t in inputs
                              if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad)
        graph.loss = reserve_for_loss(ways.solved.prepared.graph) if self._loss is None else self._loss

    def _share(self) -> None:
        """Share the budget out among all graphs. Raises `InfeasibleBudget`."""
        graphs = list(dict.fromkeys(g for known in self._known for g in known))
        parts = [g.part for g in graphs if g.part is not None]
        if len(parts) < len(graphs):
            return                              # of a step that does not run now
        moments = [
            Moment(sum(g.gradients for g in known[k + 1:]),
                   Counter(graphs.index(g) for g in known[:k + 1]), graphs.index(now))
            for known in self._known for k, now in enumerate(known)]
        moments += [Moment(known[-1].loss, Counter(map(graphs.index, known))) for known in self._known]
        wholes = [part.whole for part in parts]
        plain = max(m.taken(wholes) for m in moments)
        budget = self.planning.budget.of(plain)
        share, _ = room_for(wholes, moments, budget)
        for part in parts:
            part.look(max(0.0, share))
        shared = self._shared_out(parts, [Item(part.ways) for part in parts], Rest(0, 0, 0, plain), budget,
                                  moments)
        self._is_shared = True
        for graph, plan in zip(graphs, shared.plans, strict=True):
            self._follow(graph, plan)
        logger.warning("torch.compile has broken a step into %d graphs, which share its budget of %s bytes "
                       "from now on, and take about %s together", max(map(len, self._known)),
                       f"{budget:,}", f"{shared.taken:,}")

    def _follow(self, graph: _Graph, plan: Prototype) -> None:
        calls = max((Counter(known)[graph] for known in self._known), default=1)
        graph.module = PlannedModule(graph.graph, replace(
            self.planning, budget=Budget(bytes=plan.planned.plan.budget_bytes),
            calls_at_once=max(self._calls, calls)), (plan,))


_planned_before: dict[tuple[int, Any], Budget] = {}
"""By the first parameter of a graph and the budget that the user gave: the budget of later plans."""


_steps: weakref.WeakValueDictionary[int, SeveralGraphs | EachAlone] = weakref.WeakValueDictionary()
"""By the id of the options of a ``torch.compile``: its graphs, which keep the options."""
