"""The plans of one wrapped module: made, kept and looked up by signature and by loss."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rkmate.budget import Budget
from rkmate.codegen.emit import emit
from rkmate.errors import InfeasibleBudget, PlanError, ScheduleError
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.capture.capture import Capture, Source
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.graph.capture.structure import take_apart
from rkmate.pipeline.prepare import Prepared, held_tensors, prepare
from rkmate.pipeline.search import Searcher
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import fitting, with_heads_split
from rkmate.runtime.changes import changing, differing
from rkmate.runtime.environment import RerunState
from rkmate.runtime.executable import Gradients, PlannedStep
from rkmate.runtime.guards import Flags, Signature
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import planning_lock
from rkmate.support.progress import Progress
from rkmate.support.warn import warn

logger = logging.getLogger("rkmate")

_REMEMBERED = 16
"""Signatures whose plans are kept; the least recently used goes first."""

Pattern = tuple[bool, ...]
"""Per output, whether a gradient comes for it."""


@dataclass(frozen=True)
class Planning:
    """How the plans of one wrapped module are made."""

    budget: Budget
    planner: str
    settings: Settings
    progress: bool


@dataclass
class Ready:
    """One plan, and what runs it."""

    plan: Plan
    compiled: PlannedStep
    measured: bool = False
    """Whether a step has been measured against the prediction."""


@dataclass
class Known:
    """One signature: its capture, and a plan per pattern of output gradients."""

    capture: Capture
    ready: dict[Pattern, Ready] = field(default_factory=dict)
    pattern: Pattern = ()
    """What the next forward is planned for."""
    latest: Ready | None = None
    """The plan that the latest forward followed."""


class Plans:
    """Makes the plans of one module on demand, and keeps the latest."""

    def __init__(self, model: nn.Module, planning: Planning, saved: Sequence[Plan] = ()) -> None:
        """`saved`: plans to follow where they fit, instead of searching for one."""
        self.model = model
        self.planning = planning
        self._saved = list(saved)
        self._known: OrderedDict[Signature, Known] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[Plan]:
        """Every plan that is kept."""
        with planning_lock:
            return [r.plan for k in self._known.values() for r in k.ready.values()] or self._saved

    def find(self, key: Signature) -> Known | None:
        """The plans of a signature; it becomes the latest used."""
        known = self._known.get(key)
        if known is not None:
            with planning_lock:
                if key in self._known:
                    self._known.move_to_end(key)
        return known

    def has_flags(self, flags: Flags) -> bool:
        """Whether some plan was made under these train and gradient flags.

        Flags of other submodules than any plan was made for are flags to plan for.
        """
        with planning_lock:
            return any(k.flags == flags for k in self._known) or self._has_new_parts(flags)

    def differing(self, key: Signature) -> str:
        """In what a call differs from the nearest that a plan was made for."""
        with planning_lock:
            return differing(key, self._known)

    def _has_new_parts(self, flags: Flags) -> bool:
        return all(k.flags.parts != flags.parts for k in self._known)

    def make(self, key: Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
             plan: Plan | None = None) -> Known:
        """Plan for a new signature. `plan`: one to follow; `PlanError` when it does not fit."""
        with planning_lock:
            if key in self._known:
                return self._known[key]
            if self._known and self._has_new_parts(key.flags):
                refuse_what_cannot_repeat(self.model, args, kwargs)
            self._warn_of_changes(key)
            costs = plan.costs if plan is not None else None
            prepared = prepare(self.model, args, kwargs, self.planning.settings,
                               Progress(self.planning.progress), costs=costs)

            def split() -> Prepared:
                return with_heads_split(prepared, self.model, args, kwargs, costs=costs)

            try:
                if plan is not None and plan.fingerprint != prepared.fingerprint \
                        and prepared.can_split_heads:
                    ready = self._ready(split(), plan, self.planning.budget)
                else:
                    ready = fitting(prepared, self.planning.budget,
                                    lambda p, inside: self._ready(p, plan, inside), split)
            except InfeasibleBudget as error:
                if not self._known:
                    raise
                shapes = ", ".join(str(tuple(t.shape)) for t in _tensors(args, kwargs))
                raise InfeasibleBudget(f"a call with inputs of shape {shapes}: {error}",
                                       error.minimum_bytes) from error
            wanted = prepared.partition.program.joint.wanted
            known = Known(prepared.capture, {wanted: ready}, wanted)
            self._known[key] = known
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return known

    def _warn_of_changes(self, key: Signature) -> None:
        names = [] if self._warned else changing(key, self._known)
        if names:
            self._warned = True
            warn(
                f"{type(self.model).__name__}: {', '.join(names[:5])} changed before each of the latest "
                "plans, and each value takes a plan of its own. Make a tensor or a number that changes "
                "during training a buffer (register_buffer, and copy_ for new values), or an argument "
                "of the forward")

    def current(self, known: Known, tensors: Sequence[torch.Tensor]) -> Ready:
        """The plan that the next forward follows; made for the loss of the latest one."""
        ready = known.ready.get(known.pattern)
        if ready is None:
            with planning_lock:
                held = held_tensors(known.capture, self.model, tensors)
                try:
                    ready = self._fitting(known, known.pattern, held)
                except InfeasibleBudget as error:
                    raise InfeasibleBudget(f"a loss that leads to {_names(known.pattern)}: {error}",
                                           error.minimum_bytes) from error
                known.ready[known.pattern] = ready
        known.latest = ready
        return ready

    def again(self, known: Known, planned: Pattern, kept: RerunState,
              given: Mapping[int, torch.Tensor]) -> Gradients:
        """Gradients of a forward that was planned for another loss: it runs a second time.

        The next forward is planned for the gradients that came.
        """
        pattern = tuple(i in given for i in range(len(planned)))
        narrower = all(b for a, b in zip(pattern, planned, strict=True) if a)
        known.pattern = pattern if narrower else \
            tuple(a or b for a, b in zip(pattern, planned, strict=True))
        with planning_lock, torch.enable_grad():
            ready = known.ready.get(pattern)
            if ready is None:
                ready = known.ready[pattern] = self._for_one_step(known, pattern, kept)
        warn(
            f"the loss leads to {_names(pattern)}{' alone' if narrower else ''}, which is not what "
            f"this forward was planned for: it runs a second time, with up to "
            f"{ready.plan.peak_bytes:,} bytes beside what it keeps. The next forward is planned for "
            "this loss")
        with torch.no_grad():
            return ready.compiled.again(kept, dict(given))

    def _for_one_step(self, known: Known, pattern: Pattern, kept: RerunState) -> Ready:
        held = {s: kept.sources[source_key(s)].detach() for s in known.capture.sources.values()
                if s.kind != "tangent"}
        try:
            return self._fitting(known, pattern, held)
        except InfeasibleBudget as error:
            warn(f"{error}; this step takes that much")
            return self._fitting(known, pattern, held, Budget(bytes=error.minimum_bytes))

    def _fitting(self, known: Known, pattern: Pattern, held: Mapping[Source, torch.Tensor],
                 budget: Budget | None = None) -> Ready:
        prepared = prepare(self.model, (), {}, self.planning.settings, Progress(self.planning.progress),
                           wanted=pattern, captured=known.capture, tensors=held)
        return fitting(prepared, budget or self.planning.budget,
                       lambda p, inside: self._ready(p, None, inside),
                       lambda: with_heads_split(prepared, self.model, tensors=held))

    def _ready(self, prepared: Prepared, plan: Plan | None, budget: Budget) -> Ready:
        if plan is not None:
            _check_plan(plan, prepared)
        else:
            plan = self._saved_for(prepared)
        if plan is None:
            plan = Searcher(prepared).plan(budget, self.planning.planner)
        labels = [b.label for b in plan.blocks]
        generated = emit(prepared.partition, plan.schedule, labels, repr(plan)[1:-1], prepared.graph)
        plan = replace(plan, source=generated.text)
        return Ready(plan, PlannedStep(self.model, prepared.capture, prepared.partition, generated,
                                    prepared.device))

    def _saved_for(self, prepared: Prepared) -> Plan | None:
        for plan in self._saved:
            if plan.fingerprint == prepared.fingerprint:
                try:
                    _check_plan(plan, prepared)
                except PlanError:
                    continue
                return plan
        return None


def _names(pattern: Pattern) -> str:
    numbers = [str(i) for i, taken in enumerate(pattern) if taken]
    return f"output {', '.join(numbers)} (counted from 0)"


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return take_apart((args, kwargs), result=False)[0]


def _check_plan(plan: Plan, prepared: Prepared) -> None:
    if plan.fingerprint != prepared.fingerprint:
        raise PlanError("the plan belongs to another model, or to other input shapes, dtypes or train "
                        "flags: make a plan for this one")
    try:
        result = prepared.simulate(plan.schedule)
    except (ScheduleError, IndexError, KeyError) as error:
        raise PlanError(f"the plan's schedule does not run on this model: {error}") from error
    if result.peak != plan.peak_bytes:
        raise PlanError(f"the plan says that its peak is {plan.peak_bytes:,} bytes, the simulator "
                        f"says {result.peak:,}: make the plan again")
