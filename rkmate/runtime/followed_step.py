"""A step that follows plans, measured: its forward, the caller's loss and its backward together.

The shares of a budget come from a step that ran as it is, in which operations round otherwise, and temporary
memory of the rest meets other tensors. So a step with plans is measured. So is a step that does what no plan
knows of: a backward of a backward, several calls and what stands between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device import MeterError
from rkmate.device.events import OpenRun
from rkmate.device.protocol import PartsMeter
from rkmate.ir.simulate import LOSS_SCALARS
from rkmate.runtime.kept_plans import KeptPlans, Specialization
from rkmate.runtime.outside import Outside
from rkmate.show.plan import Plan
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.dtensor import bytes_held
from rkmate.torch_seam.memory import living
from rkmate.torch_seam.tensors import after_backward, version_of

T = TypeVar("T")
MORE = 8
"""Calls of a step after its first backward, at most: a later one is taken for another step's."""
TRIES = 4
"""Steps that are begun to be measured, at most, until one was measured as a whole."""


class FollowedStep:
    """Measures memory from the beginning of a forward to the end of its backward, without the parameters'
    new gradients, which no budget counts.

    A profiler that is stopped inside of a backward runs again: autograd restores the state of its thread. So
    it stops where the result is asked for, at an optimizer's step, or where another measurement begins.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], meter: PartsMeter | None, *, is_whole: bool = True
                 ) -> None:
        """`parameters`: of the module. `meter`: None to tell only whether the backward came. `is_whole`:
        False where calls of the step came before."""
        self.is_whole = is_whole
        """Whether the step is measured from its beginning on."""
        self.only_looks = meter is None
        """Whether the step is observed without measuring its memory."""
        self._run: OpenRun | None = None
        """The run of the meter, while it measures."""
        self._new = [0]
        """For each stretch of the step, bytes of gradients that were new by then."""
        self._waits_for_end = self._is_cut = self._is_closed = False
        self.backward_seen = False
        known = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._versions = {id(p): version_of(p) for p in known}
        self._clock, self._has_gradient = next(iter(known), None), False
        """The parameter that tells when the step is over, and whether it has got a gradient."""
        self._more, self.has_more_calls = 0, False
        """Calls that came after the first backward; and whether one of them belongs to the step."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in known]
        self._without = {id(p) for p in known if p.grad is None}
        self._others: list[torch.Tensor] = []
        """Parameters of other modules that have no gradients yet."""
        if meter is None:
            return
        self._others = [p for p in living({nn.Parameter}) if p.requires_grad and p.grad is None]
        try:
            self._run = OpenRun(meter, self._give_way, self._is_over)
        except MeterError:                      # somebody measures, or profiles
            return
        self._run.begin_part(0)

    def follow(self, result: T) -> T:
        """Follow the backwards of what a call has returned, and return that. Some add nothing to parameters'
        gradients (`torch.autograd.grad`), and several may go through one call."""
        for node in {t.grad_fn for t in tensors_in(result) if t.grad_fn is not None}:
            node.register_prehook(self._begins)
        return result

    def calls_again(self) -> None:
        """The module is called once more, maybe after a backward of this step: that call is measured, too."""
        if self.backward_seen and not self._waits_for_end:
            self._go_on(self._new[-1])

    def goes_on(self) -> bool:
        """Return whether a call that begins belongs to the step, and measure it then: a parameter that got a
        gradient has it still, and none has changed since the step began."""
        clock, self._more = self._clock, self._more + 1
        if self._is_closed or self.only_looks or self._more > MORE or clock is None or \
                version_of(clock) != self._versions[id(clock)] or (self._has_gradient and clock.grad is None):
            return False
        self.has_more_calls = True
        self.calls_again()
        return True

    def _begins(self, *_: Any) -> None:
        """A backward comes to a result."""
        if self._is_closed or (self._waits_for_end and self.backward_seen):
            return
        was_seen, self.backward_seen, self._waits_for_end = self.backward_seen, True, True
        after_backward(self._end)
        if was_seen:                            # the stretch before has ended with its backward
            self._go_on(self._new[-1])

    def _go_on(self, new: int) -> None:
        """Begin another stretch. `new`: bytes of gradients that are new by then."""
        if self._run is not None and not self._is_closed and self._run.may_go_on():
            self._run.begin_part(len(self._new))
            self._new.append(new)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A parameter has got its gradient: the next stretch begins."""
        self.backward_seen = self._has_gradient = True
        self._clock = parameter
        if not self._waits_for_end:
            self._waits_for_end = True
            after_backward(self._end)
        new = self._new[-1]
        if id(parameter) in self._without and parameter.grad is not None:
            self._without.discard(id(parameter))
            self._others = [p for p in self._others if p is not parameter]
            new += bytes_held(parameter.grad)
        self._go_on(new)

    def _end(self) -> None:
        self._waits_for_end = False
        if self._run is not None and self._run.may_go_on():
            self._run.end_part()

    def _is_over(self) -> bool:
        return self.backward_seen and not self._waits_for_end

    def _give_way(self) -> None:
        """Another measurement begins: of a plan that is made in the middle of the step."""
        self._is_cut, self._is_closed = not self._is_over(), True
        self._stop()

    def _stop(self) -> None:
        if self._run is not None and self._run.may_go_on():
            self._run.close()

    def close(self) -> None:
        """Measure no longer."""
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._stop()

    def peak(self) -> int | None:
        """Return the most bytes of the step, once that is over; None where not all of it was measured."""
        self.close()
        if self._run is None or self._is_cut or not self.backward_seen:
            return None
        others = sum(bytes_held(p.grad) for p in self._others if p.grad is not None)
        found = self._run.meter.levels()
        start = found[0][0]
        return max(peak - start - self._new[number] for number, (_, peak) in found.items()) - others


class UnusualSteps:
    """Measures a step of a module, once for each reason, where the steps do something that no plan knows of.
    If it takes more than its budget, plans are made anew with room for that, or a warning tells.

    A step is over when the module's parameters have changed.
    """

    def __init__(self, model: nn.Module, kept: KeptPlans, *, measures: bool) -> None:
        """`kept`: the plans that steps follow; `measures`: whether steps are measured at all."""
        self._model, self._kept, self._measures = model, kept, measures
        self._clock: weakref.ref[torch.Tensor] | None = None
        """A parameter that is trained. (Weights that a step makes go with the step.)"""
        self._version = -1
        self._asked: set[str] = set()
        self._remedies: dict[str, tuple[str, bool]] = {}
        """Why a step is to be measured; what a user can do, and whether plans may leave room for it."""
        self._tries = 0
        self._step: FollowedStep | None = None
        """The step that is measured."""
        self._plans: dict[int, Plan] = {}
        """The plans that it follows."""

    def ask(self, why: str, remedy: str, *, plans_anew: bool = False) -> None:
        """Have one of the next steps measured. `why`: what the steps do, for a warning; `plans_anew`: whether
        plans are made with room for it, if there is none."""
        if self._measures and why not in self._asked:
            self._asked.add(why)
            self._remedies[why] = remedy, plans_anew
            now, self._tries = self._trained(), TRIES
            if now is not None:
                self._clock, self._version = weakref.ref(now), version_of(now)

    def _trained(self) -> torch.Tensor | None:
        """Return a parameter that is trained; None without one."""
        return next((p for p in self._model.parameters() if p.requires_grad), None)

    def begin(self, plan: Plan, device: torch.device) -> None:
        """Before the forward of a call. Steps whose gradients are in place are not measured: they refuse the
        hooks that tell when a backward is over."""
        if not self._remedies or self._clock is None or plan.gradients == "in_place":
            return
        now = self._clock()
        if now is None or not now.is_leaf:      # weights that a step makes are other tensors in the next one
            now = self._trained()
        version = -1 if now is None else version_of(now)
        if version != self._version or now is not self._clock():
            if now is not None:
                self._clock = weakref.ref(now)
            self._version, ended, self._step = version, self._step, None
            if ended is not None:
                self._judge(ended.peak(), is_same=id(plan) in self._plans)
            if self._remedies and self._tries:
                self._tries, self._plans = self._tries - 1, {}
                self._step = FollowedStep(self._model.parameters(), devices.of(device).parts_meter())
        elif self._step is not None:
            self._step.calls_again()
        if self._step is not None:
            self._plans[id(plan)] = plan

    def follow(self, result: T) -> T:
        """Follow the step from the result of a call's forward on. Returns the result."""
        return result if self._step is None else self._step.follow(result)

    def _judge(self, peak: int | None, *, is_same: bool) -> None:
        """Have plans made anew, or warn, where a step took more than its budget. `is_same`: whether the next
        step follows the plan."""
        by_plan = {id(e.plan): s for s in self._kept.all() for e in [*s.executables.values()]}
        if peak is None or not is_same or not self._plans.keys() <= by_plan.keys():
            return
        budget = max(p.budget_bytes + by_plan[key].traced.outside for key, p in self._plans.items())
        (why, (remedy, plans_anew)), *others = self._remedies.items()
        if peak > budget and plans_anew and not others and self._leave_room(
                [by_plan[key] for key in self._plans], peak, (why, remedy)):
            self._remedies, self._tries = {why: (remedy, False)}, TRIES
            return
        if peak > budget + budget // 100:
            warn(f"{why}: a step takes {peak:,} bytes, and the budget is {budget:,}. {remedy}")
        self._remedies = {}

    def _leave_room(self, signatures: Sequence[Specialization], peak: int, because: tuple[str, str]) -> bool:
        """Let plans be made anew that leave room for what a step took on top of the largest one. Returns
        whether that is possible."""
        if not all(known.may_leave_room for known in signatures):
            return False
        seen = Outside(peak - max(p.peak_bytes for p in self._plans.values()) + LOSS_SCALARS, because=because)
        for known in signatures:
            known.outside = max(known.outside, seen, key=lambda found: found.held)
        return True
