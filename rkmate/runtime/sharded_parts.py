"""The planned parts of a sharded model, and what a step shows of the bytes outside of their plans.

A part is a kind of sharded layer, or the rest of the model's forward. Each has schedules that hold more or
less between forward and backward (`rkmate.pipeline.part_plans`). No plan knows what else a step takes:
gathered parameters, their gradients, buffers of the exchange. So a step is measured from moment to moment,
and what the parts hold at each is taken off.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import nn

from rkmate.device.protocol import PartsMeter
from rkmate.pipeline.part_plans import PartWays
from rkmate.pipeline.prepare import Traced
from rkmate.planners.several_calls import Way
from rkmate.runtime.guards import Guards
from rkmate.runtime.module import PlannedModule
from rkmate.runtime.plan_cache import Prototype, Specialization
from rkmate.runtime.segments import Call
from rkmate.torch_seam.modules import forward_hooks_of, forward_pre_hooks_of
from rkmate.torch_seam.tensors import after_backward

# -- What is planned -------------------------------------------------------------------------------


@dataclass(eq=False)
class Part:
    """Calls that are alike, of sharded layers or of the rest of the forward: the schedules that they may
    follow."""

    model: nn.Module
    key: Guards
    traced: Traced
    forms: list[PartWays]
    """The schedules of each variant of the graph, the original's first."""
    is_changed_at_once: bool = False
    """Whether the first step, too, may follow a variant that changes last bits."""

    @functools.cached_property
    def first(self) -> Way:
        """The schedule that is followed at first: one that holds least, and that takes least of these."""
        ways = self.ways if self.is_changed_at_once else self.forms[0].ways
        return min(ways, key=lambda way: (way.saved, way.extra))

    @functools.cached_property
    def example(self) -> Prototype:
        """The plan that is followed at first."""
        return self.prototype(self.ways.index(self.first), self.first.extra)

    @property
    def ways(self) -> list[Way]:
        """The figures of all schedules. A variant that changes last bits has to be faster by a percent."""
        return [replace(w, seconds=w.seconds * (1.01 if k else 1))
                for k, form in enumerate(self.forms) for w in form.ways]

    @property
    def whole(self) -> Way:
        """The figures of a call without recomputation."""
        return self.forms[0].whole

    @property
    def least_saved(self) -> int:
        """The fewest bytes that a call can hold between its forward and its backward."""
        return min(w.saved for w in self.ways)

    def form_of(self, number: int) -> tuple[PartWays, int]:
        """Return the variant of a schedule, and the schedule's number in it."""
        for form in self.forms:
            if number < len(form.ways):
                return form, number
            number -= len(form.ways)
        raise IndexError(number)

    def prototype(self, number: int, extra: int) -> Prototype:
        """Return a plan with one of the schedules. `extra`: bytes on top of what it saves that it may take
        while it runs."""
        form, own = self.form_of(number)
        return Prototype(self.model, self.key, self.traced, form.planned(own, extra), not any(
            forward_hooks_of(m) or forward_pre_hooks_of(m) for m in self.model.modules()
            if m is not self.model))


class Within(Protocol):
    """The sharded model that a part belongs to."""

    def provide(self, follower: Follower, key: Guards, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give a planned module a plan for a call that it has none for."""

    def running(self, follower: Follower) -> AbstractContextManager[None]:
        """Return a context around a planned call."""


class Follower(PlannedModule):
    """A planned call of a sharded layer, or of the rest of a forward."""

    _FIELDS = PlannedModule._FIELDS | {"_within"}
    _within: Within | None

    def _new_signature(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
                       ) -> Specialization | None:
        if self._within is not None and self._has_something_to_train(args, kwargs):
            self._within.provide(self, key, args, kwargs)
        return super()._new_signature(key, args, kwargs)

    def _run_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._within is None:
            return super()._run_planned(args, kwargs)
        with self._within.running(self):
            return super()._run_planned(args, kwargs)

    @property
    def cache(self) -> Any:
        """The plans."""
        return self._plans

    @property
    def reader(self) -> Any:
        """The reader of the module's guards."""
        return self._reader


# -- What a step shows -----------------------------------------------------------------------------


class Rest(NamedTuple):
    """Bytes of a step outside of all plans, at most."""

    beside: int
    """While a planned part runs, and all others hold what they save."""
    alone: int
    """While no planned part runs, and all hold what they save."""
    early: int
    """Before the first planned part has run, and after the last."""
    plain: int
    """Bytes of the whole step without recomputation."""

    def together(self, other: Rest) -> Rest:
        """Return the larger figures of two steps."""
        return Rest(*map(max, self, other))

    def least(self, earlier: Rest | None) -> Rest:
        """Return the smaller figures of two measurements of one step."""
        return self if earlier is None else Rest(*map(min, self, earlier))


class Observed:
    """A step in which memory is measured from moment to moment."""

    def __init__(self, meter: PartsMeter) -> None:
        """Raises `MeterError` where something else measures."""
        self._meter = meter
        self._session = ExitStack()
        self._session.enter_context(meter.running())
        self._stretch = ExitStack()
        self._stretches: list[tuple[int | None, tuple[int, ...]]] = []
        """Of each stretch of the step, the number of the planned call that runs, and of those that hold."""
        self._holding: dict[int, None] = {}
        self.calls: list[tuple[Follower, Part, Way]] = []
        """The planned calls, and what each follows."""
        self._waits = self._is_over = False
        self._next(None)

    def _next(self, running: int | None) -> None:
        if self._is_over:
            return
        self._stretch.close()
        self._stretch.enter_context(self._meter.part(len(self._stretches)))
        self._stretches.append((running, tuple(self._holding)))

    def forward_begins(self) -> None:
        """Note that a planned call begins."""
        self._next(len(self.calls))

    def forward_over(self, call: Call, follower: Follower, part: Part, way: Way) -> None:
        """Note that a planned call has returned."""
        number = len(self.calls)
        self.calls.append((follower, part, way))
        self._holding[number] = None
        self._next(None)
        begins, finished = call.begins, call.finished

        def began(grads: Any) -> None:
            if not self._waits:
                self._waits = True
                after_backward(self._end)
            self._holding.pop(number, None)
            self._next(number)
            if begins is not None:
                begins(grads)

        def over() -> None:
            self._next(None)
            if finished is not None:
                finished()

        call.begins, call.finished = began, over

    def _end(self) -> None:
        """The backward is over. The measurement goes on: what a thread has begun, autograd's engine gives it
        back after this."""
        self._is_over = True
        self._stretch.close()

    def close(self) -> None:
        """End the measurement."""
        self._end()
        self._session.close()

    def rest(self) -> Rest | None:
        """Return what was outside of all plans; None if the backward has not come to its end."""
        if not self._waits or self._holding:
            return None
        levels = self._meter.levels()
        beside = alone = early = plain = 0
        least = {n: part.least_saved for n, (_, part, _) in enumerate(self.calls)}
        for k, (running, holding) in enumerate(self._stretches):
            begin, peak = levels.get(k, (0, 0))
            held = sum(self.calls[n][2].saved for n in holding)
            whole = sum(self.calls[n][1].whole.saved for n in holding)
            # All that hold nothing now are counted as if they held what they hold at least.
            absent = sum(bytes_ for n, bytes_ in least.items() if n not in holding and n != running)
            if running is not None and running < len(self.calls):
                _, part, way = self.calls[running]
                own = 0 if running not in self._of_backward(k) else way.saved
                base = max(begin - own, peak - way.saved - way.extra) - held
                beside = max(beside, base - absent)
                plain = max(plain, base + whole + part.whole.saved + part.whole.extra)
            else:
                base = peak - held
                plain = max(plain, base + whole)
                if holding:
                    alone = max(alone, base - absent)
                else:
                    early = max(early, base)
        return Rest(beside, alone, early, plain)

    def _of_backward(self, stretch: int) -> set[int]:
        """Return the calls that have run before a stretch."""
        return {n for n, _ in self._stretches[:stretch] if n is not None}
