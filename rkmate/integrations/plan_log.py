"""Figures of a module's plans for TensorBoard, Weights & Biases, or any other logger: once for each plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rkmate.errors import ArgumentError
from rkmate.parts.apply import planned_call_of
from rkmate.runtime.module import PlannedModule
from rkmate.show.plan import Plan

Write = Callable[[Mapping[str, float], int | None], object]
"""Takes figures by name, and the training step."""


class PlanLog:
    """A logger of the figures of a module's plans, each plan once: ``log = PlanLog(model, to=writer)`` before
    the training, ``log(step)`` after each step. A call without a new plan does nothing.

    The figures are ``rkmate/peak_bytes``, ``rkmate/budget_bytes``, ``rkmate/plain_peak_bytes`` (without
    rematerialization), ``rkmate/overhead`` (the step's extra time, as a fraction),
    ``rkmate/recomputed_share`` (the part of the step that computes again) and ``rkmate/planning_seconds``.

    Args:
        module: a module that `rkmate.wrap` has returned, or one that `rkmate.apply` was called with.
        to: a ``SummaryWriter`` of TensorBoard, a run of Weights & Biases (what ``wandb.init`` returns), or a
            function that takes the figures by name, and the step.

    Raises:
        ArgumentError: `to` is none of these.
    """

    def __init__(self, module: nn.Module, to: Any) -> None:
        self._module = module
        self._write = writing(to)
        self._logged: dict[int, weakref.ref[Plan]] = {}

    def __call__(self, step: int | None = None) -> int:
        """Log each plan that is new, at a training step. Returns the number of new plans."""
        new = [p for p in plans_of(self._module)
               if (known := self._logged.get(id(p))) is None or known() is not p]
        for plan in new:
            self._logged[id(plan)] = weakref.ref(plan)
            self._write(figures(plan), step)
        return len(new)


def figures(plan: Plan) -> dict[str, float]:
    """Return the figures of a plan, by the names under which they are logged."""
    again = sum(plan.replay().recomputed_seconds.values())
    return {"rkmate/peak_bytes": plan.peak_bytes, "rkmate/budget_bytes": plan.budget_bytes,
            "rkmate/plain_peak_bytes": plan.baseline_peak_bytes, "rkmate/overhead": plan.overhead,
            "rkmate/recomputed_share": again / plan.step_seconds if plan.step_seconds else 0.0,
            "rkmate/planning_seconds": sum(plan.stage_seconds.values())}


def plans_of(module: nn.Module) -> list[Plan]:
    """Return the plans that a module keeps; none for a module without a budget."""
    if isinstance(module, PlannedModule):
        return module._plans.all()
    call = planned_call_of(module)
    return [] if call is None else call.plans()


def writing(to: Any) -> Write:
    """Return the function that writes figures to a logger. Raises `ArgumentError` for an unknown one."""
    if callable(getattr(to, "add_scalar", None)):           # TensorBoard
        def write(values: Mapping[str, float], step: int | None) -> None:
            for name, value in values.items():
                to.add_scalar(name, value, global_step=step)
        return write
    if callable(getattr(to, "log", None)):                  # Weights & Biases
        return lambda values, step: to.log(dict(values), step=step)
    if not callable(to):
        raise ArgumentError(f"to is {to!r}; it should be a SummaryWriter of TensorBoard, a run of Weights & "
                            "Biases (what wandb.init returns), or a function of figures and the step")
    taken: Write = to
    return taken
