"""The public face: `wrap`, `plan`, `tradeoff`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rkmate.budget import Budget, parse_budget
from rkmate.errors import ArgumentError, InfeasibleBudget, PlanError
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.pipeline.device_budget import auto_budget
from rkmate.pipeline.prepare import check_model, prepare
from rkmate.pipeline.search import Searcher
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.trained_outputs import checked_trains
from rkmate.pipeline.variants import fitting, fitting_curve, with_heads_split
from rkmate.planners.registry import planner as find_planner
from rkmate.runtime.module import NewShape, PlannedModule
from rkmate.runtime.plan_cache import Planning
from rkmate.show.curve import Curve
from rkmate.show.plan import Plan
from rkmate.support.progress import Progress


def wrap(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
         budget: int | float | str | None = None, planner: str = "rockmate", progress: bool = True,
         plan: Plan | None = None, costs: str = "measured", verify: bool = True,
         on_new_shape: NewShape = "plan", trains: str | int | Sequence[str | int] | None = None,
         planning_seconds: float | None = None,
         settings: Settings | None = None) -> PlannedModule:
    """An equivalent module that trains inside a memory budget.

    Args:
        model: the module to train, with the train flags that it will be trained with.
        args, kwargs: sample inputs of its forward, of the size that it will be trained with.
        budget: bytes (int), text ("600MiB", "1.5GB"), a float in (0, 1], which is a fraction of the
            model's own peak, or ``"auto"``, which is what `auto_budget` says. It bounds what a
            training step allocates above what stands before it, parameter gradients left out.
        planner: how the schedule is found.
        progress: show progress on a terminal.
        plan: a plan made before (`Plan.load`), instead of a budget.
        costs: ``"measured"`` runs each unique block once; ``"analytic"`` runs nothing.
        verify: measure the first training step, and warn when it is over its prediction.
        on_new_shape: what a call with other shapes, dtypes or constants does: ``"plan"`` makes a
            plan for it with the same budget, ``"original"`` runs the original module, ``"error"``
            raises.
        trains: which outputs the loss is computed from: ``"all"``, or a list of names (keys and
            fields, ``"aux.0"`` for the first of those under ``aux``) and numbers of output tensors. Unless
            given: the output named ``loss`` if it is a scalar, else the scalars, else all but
            by-products such as caches and hidden states. A loss that leads to others is right, too,
            but its first step runs the forward twice.
        planning_seconds: the limit of a planner that can stop early (the integer programs on the
            whole graph, ``auto``, ``dtr``); their own unless given.
        settings: of the stages.

    Returns:
        A module with the same parameters, buffers, outputs and gradients; ``.plan`` and
        ``.source`` show what it does.

    Raises:
        InfeasibleBudget: no schedule fits; ``.minimum_bytes`` is the smallest budget.
        CaptureError: the model has no static graph; the message names the operation and the line.
        ArgumentError: an argument is wrong.
        PlanError: `plan` does not belong to this model.
    """
    args, kwargs = checked_sample(model, args, kwargs)
    planning = _planning(_in_bytes(budget, model), plan, planner, costs, settings, progress,
                         planning_seconds, trains)
    if on_new_shape not in ("plan", "original", "error"):
        raise ArgumentError(f'on_new_shape is {on_new_shape!r}; it should be "plan", "original" or '
                            '"error"')
    return PlannedModule(model, args, kwargs, planning, plan, verify, on_new_shape)


def plan(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
         budget: int | float | str, planner: str = "rockmate", progress: bool = True,
         costs: str = "measured", trains: str | int | Sequence[str | int] | None = None,
         planning_seconds: float | None = None, settings: Settings | None = None) -> Plan:
    """The plan that `wrap` would follow, without generating code. Same arguments and errors."""
    args, kwargs = checked_sample(model, args, kwargs)
    planning = _planning(_in_bytes(budget, model), None, planner, costs, settings, progress,
                         planning_seconds, trains)
    prepared = prepare(model, args, kwargs, planning.settings, Progress(progress))
    return fitting(prepared, planning.budget, lambda p, inside: Searcher(p).plan(inside, planner),
                   lambda: with_heads_split(prepared, model, args, kwargs))


def tradeoff(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
             budgets: Sequence[int | float | str] | None = None, planner: str = "rockmate",
             progress: bool = True, costs: str = "measured",
             trains: str | int | Sequence[str | int] | None = None,
             planning_seconds: float | None = None, settings: Settings | None = None) -> Curve:
    """Plans along the curve of time against memory, from the largest budget to the smallest.

    One capture, one measurement and one set of options serve all of them. Without `budgets`: from
    the model's own peak to the smallest one that the original's operations meet, in ten steps. The
    result is a sequence of plans that can be drawn (``.plot("curve.svg")``). Raises `InfeasibleBudget`
    for a budget that was asked for and cannot be met, and otherwise what `wrap` raises.
    """
    args, kwargs = checked_sample(model, args, kwargs)
    wanted = None if budgets is None else [parse_budget(_in_bytes(b, model)) for b in budgets]
    planning = _planning(1.0, None, planner, costs, settings, progress, planning_seconds, trains)
    prepared = prepare(model, args, kwargs, planning.settings, Progress(progress))
    return Curve(tuple(fitting_curve(prepared, wanted, planner,
                                     lambda: with_heads_split(prepared, model, args, kwargs))))


def _in_bytes(budget: Any, model: nn.Module) -> Any:
    """``"auto"`` in bytes; other budgets as they are."""
    return auto_budget(model) if isinstance(budget, str) and budget == "auto" else budget


def checked_sample(model: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sample inputs as a tuple and a dict. Raises `ArgumentError` for what is wrong with them or the
    model, and `CaptureError` for what a planned step could not repeat."""
    check_model(model)
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(f"args is {type(args).__name__}; it should be a tuple with the sample "
                            "positional arguments: (x,) for one tensor")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs is {type(kwargs).__name__}; it should be a mapping of argument "
                            "names to sample values")
    args, kwargs = tuple(args), dict(kwargs or {})
    refuse_what_cannot_repeat(model, args, kwargs)
    return args, kwargs


def _planning(budget: Any, plan: Plan | None, planner: str, costs: str, settings: Settings | None,
              progress: bool, planning_seconds: float | None, trains: Any) -> Planning:
    if (budget is None) == (plan is None):
        raise ArgumentError("give a budget or a plan, and not both")
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentError(f"plan is {type(plan).__name__}; it should be a rkmate.Plan")
    find_planner(planner)
    if costs not in ("measured", "analytic"):
        raise ArgumentError(f'costs is {costs!r}; it should be "measured" or "analytic"')
    from dataclasses import replace

    checked = Budget(bytes=plan.budget_bytes) if plan is not None else parse_budget(budget)
    base = replace(settings or Settings(), costs=costs)  # type: ignore[arg-type]
    if trains is not None:
        base = replace(base, trains=checked_trains(trains))
    if planning_seconds is not None:
        if not planning_seconds > 0:
            raise ArgumentError(f"planning_seconds is {planning_seconds}; it should be a positive "
                                "number of seconds")
        base = replace(base, planning_seconds=planning_seconds)
    return Planning(checked, planner, base, progress)


__all__ = ["InfeasibleBudget", "PlanError", "plan", "tradeoff", "wrap"]
