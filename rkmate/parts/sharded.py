"""One budget for a model whose layers are sharded by `fully_shard` (FSDP2), by FSDP1, or by DeepSpeed's ZeRO
stage 3.

Each sharded layer gathers its parameters in hooks around its forward and its backward (those of FSDP1 are in
the module around it), so each is planned by itself, and its hooks stay outside of its plan. Where a layer has
sharded parts, these are planned. A layer of one operation has nothing to compute again, and runs as it is.

The rest of the model's forward after the last sharded module (a norm, the head, the loss) is planned, too: it
is captured with stubs instead of the sharded modules, which hand out what these have returned.

The budget is that of the whole step. No plan knows gathered parameters, their gradients, and the buffers of
the exchange, so a step shows them: the first step is planned to hold as little as possible, the second is
measured, and from the third step on the layers share what the rest leaves.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.device.events import before_optimizers
from rkmate.device.protocol import MeterError
from rkmate.errors import ArgumentError, CaptureError, InfeasibleBudget, RkmateError
from rkmate.graph.capture.structure import GIVEN, take_call_apart
from rkmate.parts.moments import room_for
from rkmate.parts.one_budget import (
    Part,
    Rest,
    Shared,
    advice_to_shard,
    is_unobserved,
)
from rkmate.parts.sharded_parts import ShardedParts
from rkmate.parts.sharded_rest import Reached
from rkmate.parts.sharded_step import KEPT, Exchanges, Follower, Observed, Signature, bounds, tied
from rkmate.planners.several_calls import Item, Moment
from rkmate.runtime.agreement import Ranks, ranks_that_share, shows_signs
from rkmate.runtime.guards import guards_of
from rkmate.runtime.kept_plans import Planning
from rkmate.runtime.snapshot import by_content
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.modules import INSIDE_OF_FLAT, gathered_registered, own_call
from rkmate.torch_seam.patches.modules import returned_uncompiled
from rkmate.torch_seam.tensors import inside_backward, version_of
from rkmate.torch_seam.trace import several_ranks

logger = logging.getLogger("rkmate")

AGREED = 3
"""The step before which all ranks compare what they have measured."""
AGAIN, CLOSE = 2, 1.5
"""Times that a step is measured again if the smallest budget that it shows is above the given one, and at
most this multiple of it: threads of gloo may have let go of what was exchanged late."""
MANY = 64
"""Calls in one step, at most: outputs that stay alive, and for which no backward comes, hold no step open."""
LATER = 16
"""From this step on, steps are measured whose number is a power of two: they may take more than before."""
_WAITS = "waits"
"""Text of a rank whose gradients have not been exchanged yet."""


_models: weakref.WeakValueDictionary[int, Sharded] = weakref.WeakValueDictionary()
"""The planners of all sharded models, which may run in one step, in the order in which they were made."""
_numbers = itertools.count()

# -- The model -------------------------------------------------------------------------------------


class Sharded(ShardedParts):
    """A model with sharded layers, and one budget."""

    _too_large = (
        "{name} is sharded, and no plans of its layers keep a step within {budget:,} bytes: what is outside "
        "of all plans (gathered parameters, their gradients, buffers of the exchange) takes up to "
        "{outside:,}, and the smallest budget that can be met is about {least:,} bytes ({share:.0%} of the "
        "step's own peak of about {plain:,} bytes)")

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], planning: Planning,
                 around: nn.Module | None = None) -> None:
        """Share one budget among sharded layers. Without layers, the rest of the forward is all of it.
        `around`: the FSDP1 around the model, if there is one.

        Raises `ArgumentError` if several calls before a backward were requested."""
        if planning.settings.calls != 1:
            raise ArgumentError(f"calls is {planning.settings.calls}, and {type(model).__name__} has sharded "
                                "layers, which share a budget as calls of one module do: apply a budget to "
                                "each layer, with calls=layers times calls")
        self._offload = planning.settings.offload           # of layers: the rest keeps its data
        # Measuring runs in the middle of a step: there is no room for a buffer as large as the caches.
        measure = replace(planning.settings.measure, cold=planning.settings.measure.cold or False)
        # Several calls before a backward are not told of by each layer: a measured step shows them.
        super().__init__(model, replace(
            planning, more_calls=lambda: None, calls_at_once=sys.maxsize,
            settings=replace(planning.settings, offload=None, measure=measure)))
        self._spread = model if around is None else around
        """The module with all sharded parameters."""
        self._weights = {layer: sum(p.nbytes for p in layer.parameters()) or 1 for layer in layers}
        self._too_large += advice_to_shard(model, self.units)
        self._signatures: dict[Any, Signature] = {}
        self._leading: Signature | None = None
        """The calls of the step so far."""
        # A rank may have no elements of a parameter, and what FSDP1 has gathered now is no leaf.
        self._clock = max((p for p in model.parameters() if p.requires_grad and p.is_leaf),
                          key=lambda p: p.numel() > 0, default=None)
        self._version, self._training, self._has_new_parts = 0, True, False
        self._trains_in_evaluation = False
        """Whether the latest step with a backward was in evaluation mode."""
        self._leader: Sharded = self
        """The model that is called first in the step this one takes part in: it shares the budget out."""
        self._guests: weakref.WeakSet[Sharded] = weakref.WeakSet()
        """Other models that have been called in steps of this one."""
        self._step: Observed | None = None
        self._wanted: list[Signature] = []      # what the step is measured for
        self._until: Callable[[], None]
        """Ends the look-out for an optimizer's step, before which the measurement ends."""
        self._steps, self._agreed, self._again = 0, AGREED, AGAIN
        self._exchanges, self._standing = Exchanges(model), 0
        self._uncompiled = ExitStack()
        self._uncompiled.enter_context(returned_uncompiled(model))
        self._number = next(_numbers)
        _models[self._number] = self
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def planning_of(self, layer: nn.Module) -> Planning:
        """Return how a layer is planned: the limit on data that is away is shared by bytes of parameters."""
        offload = self._offload
        return self.planning if offload is None else replace(self.planning, settings=replace(
            self.planning.settings, offload=offload.part(self._weights[layer], sum(self._weights.values()))))

    def set_up(self, own: Callable[..., Any], tail: Follower) -> None:
        """Complete the model. `own`: its own forward; `tail`: the holder of plans for the rest of it."""
        self.rest.own, self.tail = own, tail

    def take_away(self) -> None:
        """Leave the calls of sharded modules without plans as they were."""
        self._close()
        self._exchanges.close()
        self._uncompiled.close()
        self._leading = None
        _models.pop(self._number, None)
        self._stop_watching()

    # -- calls of the model ---------------------------------------------------------------

    def called(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, with its hooks."""
        if GIVEN in kwargs:
            return self.rest.run(*args, **kwargs)
        if self._now is not None:
            return call(*args, **kwargs)
        leader = next((m for m in (self._leader, *_models.values()) if m._goes_on(self)), None)
        if leader is None:
            self._leader._close()
        if is_unobserved():
            return call(*args, **kwargs)
        tensors, structure, constants = take_call_apart(args, kwargs)
        kinds = () if self.tail is None else self.tail.cache.observations.kinds_in(tensors)
        key = (tuple((t.shape, t.dtype, t.requires_grad) for t in tensors), structure,
               tuple(map(by_content, constants)), self._model.training, kinds)
        now = self._signatures.get(key) or self._signatures.pop((*key[:-1], ()), None) or Signature()
        self._signatures[key] = now             # the first step has shown what a library looks at
        if len(self._signatures) > KEPT:
            self._forget(next(k for k, s in self._signatures.items()
                              if s is not now and self._leading not in s.family))
        if leader is None:
            self._begin_step(now, (args, kwargs))
        else:
            leader._is_joined_by(self, key)
        self._now = now
        try:
            return call(*args, **kwargs)
        except BaseException:
            self._leader._close()
            raise
        finally:
            self._now = None
            self.rest.returned = []

    def _goes_on(self, called: Sharded | None = None) -> bool:
        """Return whether a call now belongs to the step that a call of this model has begun: what its calls
        have returned waits for its backward, and the parameters are what they were. `called`: the model that
        is called: calls in evaluation whose outputs are kept are not part of a training step."""
        return (self._leading is not None and self._version == self._version_now()
                and self._leading.number < MANY
                and (called is not self or self._training == self._model.training)
                and any(follower.cache.open_calls.now() for m in self._of_step for follower in m._chosen))

    def _is_joined_by(self, model: Sharded, key: Any) -> None:
        """Note that a model is called, this one or another, in a step that this one has begun. `key`: its
        arguments, except for values."""
        assert self._leading is not None
        self._leading = self._leading.followed_by((model._number, key))
        if model._leader is not self:
            model._close()
            model._leader, model._leading = self, None
        if model is not self and model not in self._guests:
            self._guests.add(model)
            model._exchanges.step_begins()

    @property
    def _of_step(self) -> list[Sharded]:
        """The models of a step that this one begins."""
        return [m for m in _models.values() if m is self or m in self._guests]

    def _version_now(self) -> int:
        return 0 if self._clock is None else version_of(self._clock)

    def _begin_step(self, now: Signature, given: Any) -> None:
        """Begin a step, whose first call has this signature."""
        if self._leading is not None:
            is_trained = any(m._exchanges.has_come for m in self._of_step)
            if is_trained:
                self._trains_in_evaluation = not self._training
            self._leading.ends(is_trained, self._has_new_parts,
                               any(m._exchanges.are_kept_whole for m in self._of_step))
        self._leader, self._leading, self._training = self, now, self._model.training
        self._version, self._has_new_parts = self._version_now(), False
        self._steps += now.is_begun
        if gone := {call for model in self._of_step for call in model.take_losses()}:
            for signature in [s for model in _models.values() for s in model._all if gone & {*s.observed}]:
                signature.start_again()
        for model in self._of_step:
            model._exchanges.step_begins()
        if self._whole_gradients > self._standing:
            self._make_room(self._whole_gradients)
        if self._steps == 1:
            logger.warning("%s: this step plans its layers, and the next one is measured. Both "
                           "take as little as is known before, which may be more than the budget", self._type)
        ranks = ranks_that_share(self._spread) if self._steps == self._agreed else None
        self._share_out(now.next_shared, ranks)
        now.calls += 1
        if now.calls >= LATER and not now.calls & now.calls - 1:
            for signature in now.family:
                signature.check_again()
        self._wanted = now.wanted(self._standing == self._whole_gradients)
        if self._wanted or (now.calls == 1 and (self._training or self._trains_in_evaluation)):
            self._observe(given)

    @property
    def _all(self) -> list[Signature]:
        """All known steps that this model begins."""
        return [s for first in self._signatures.values() for s in first.family]

    @property
    def _whole_gradients(self) -> int:
        """Bytes of whole gradients that were in memory when the step began, at most."""
        return sum(m._exchanges.standing for m in self._of_step)

    def _forget(self, key: Any) -> None:
        """Forget a signature, and the plans that no other one has."""
        old = {part for s in self._signatures.pop(key).family for _, part in s.observed}
        old -= {part for m in _models.values() for s in m._all for _, part in s.observed}
        for model in self._of_step:
            model._parts = [part for part in model._parts if part not in old]
            for follower, chosen in model._chosen.items():
                if chosen.keys() & old:
                    model._chosen[follower] = {part: c for part, c in chosen.items() if part not in old}
                    follower.cache.follow([p for _, p in model._chosen[follower].values()])

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward inside of its hooks: as it is up to the last sharded module, then the plan
        of the rest."""
        if GIVEN in kwargs:
            return self.rest.run(*args, **kwargs)
        if is_unobserved():
            return self.rest.own(*args, **kwargs)
        if self._now is None:                   # by another method (register_fsdp_forward_method)
            return self.called(lambda *a, **k: self.forward(a, k), args, kwargs)
        self._arguments, tail = (args, kwargs), self.tail
        assert tail is not None
        try:
            if self._weights or not (tail.trains(args, kwargs) and self._is_rest_planned(tail)):
                return self.rest.own(*args, **kwargs)
        except Reached:
            pass
        finally:
            self._arguments = (), {}
        with self.rest.stubs():
            return tail.forward(*args, **kwargs, **{GIVEN: self.rest.given})

    def called_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a sharded module that has no plan."""
        return self.returned(module, own_call(module)(*args, **kwargs))

    def returned(self, module: nn.Module, result: Any) -> Any:
        """A sharded module has returned."""
        now = self._now
        if now is None or now.tail is False or self.tail is None or not self.rest.waits_for(module) \
                or is_unobserved():
            return result
        number = self.rest.note(module, result)
        if now.tail is None and module is self.units[-1]:
            now.tail = number
        if now.tail == number:
            if self._is_rest_planned(self.tail):
                raise Reached
            now.tail = False
        if now.tail is False:
            self.rest.returned = []
        return result

    # -- the rest of the forward ----------------------------------------------------------

    def _is_rest_planned(self, tail: Follower) -> bool:
        """Return whether there is a plan for the rest of the forward; it is made if there can be one."""
        args, kwargs = self._arguments
        kwargs = {**kwargs, GIVEN: self.rest.given}
        with self.rest.stubs(), gathered_registered(self._model):
            key = tail.cache.observations.with_kinds(*guards_of(tail.reader, args, kwargs))
            if tail.cache.kept.find(key) is not None:
                return True
            try:
                with self.planning_apart():
                    tail.cache.make(self.provide(tail, key, args, kwargs), args, kwargs)
            except RkmateError as error:
                if not self.units:
                    raise
                say = logger.info if isinstance(error, CaptureError) else logger.warning
                say("the rest of the forward of %s, after its last sharded module, runs as it is: %s",
                    self._type, error)
                return False
        return True

    def _has_planned(self) -> None:
        self._leader._has_new_parts |= self._now is not None        # the next step is measured (again)

    @property
    def _gathered(self) -> int:
        return self._exchanges.gathered

    def planning_apart(self) -> AbstractContextManager[object]:
        """Return a context to plan a call in, in the middle of a step that may be measured."""
        step = self._leader._step
        return nullcontext() if step is None else step.paused()

    # -- a step ---------------------------------------------------------------------------

    def _observe(self, given: Any) -> None:
        place = devices.common([*self._model.parameters(), *self._model.buffers(), *tensors_in(given)])
        try:
            # What a schedule, or the user, has gathered before the first call counts, too.
            standing = self._whole_gradients + sum(m._exchanges.gathered for m in self._of_step)
            self._step = Observed(place.parts_meter(), standing, goes_on=self._has_further_calls)
            self._until = before_optimizers(self._steps_now)
        except MeterError as error:
            if any(s.rest is None for s in self._wanted):
                self._warn_once("meter", f"the step of {self._type} cannot be measured now, and its sharded "
                                f"layers hold as little as they can until it is: {error}")

    def _steps_now(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps: maybe another model's, while what this one has made waits, or in a backward."""
        own = any(p is self._clock for g in optimizer.param_groups for p in g["params"])
        if (own or not self._goes_on()) and not inside_backward():
            self._close(is_over=own)

    def _close(self, is_over: bool = False) -> None:
        """End the observation of a step, and note what it has shown. `is_over`: no backward comes for calls
        that hold something still."""
        if self._step is None:
            return
        step, self._step, signature = self._step, None, self._leading
        self._until()
        step.close(is_over)
        if signature is None or not any(m._exchanges.has_come for m in self._of_step):      # an evaluation
            return
        if self._has_new_parts or not self._wanted:
            if step.rest() is not None:
                signature.planning_took = step.peak
                self._warn_over(signature, "")
            return
        signature.has_come_for(self._wanted)
        signature.note(step, any(m._exchanges.are_kept_whole for m in self._of_step),
                       budget := self._budget_of(signature), self._version)
        if self._steps > self._agreed and signature.rest is not None:
            self._warn_over(signature, "The budget is shared out before the next step with such calls")
        if signature.is_shared and signature.over <= budget < signature.most_taken:
            logger.warning("%s: a step that was measured has taken %s bytes of the budget of %s, and another "
                           "one %s: threads let go of exchanged buffers late in some steps, or calls without "
                           "a backward (evaluation that records gradients) came before", self._type,
                           *(f"{n:,}" for n in (signature.most_taken, budget, signature.over)))
            signature.most_taken = 0

    @contextmanager
    def running(self, follower: Follower) -> Iterator[None]:
        """Around a planned call."""
        leader = self._leader
        step = None if self._now is None else leader._step
        if step is not None:
            step.forward_begins()
        yield
        opened = follower.cache.open_calls.now()
        if opened:
            self._exchanges.watch(opened[-1], follower.original)
        if step is None or leader._step is None:    # given up
            return
        latest = follower.cache.kept.latest()
        capture = None if latest is None else latest.capture
        found = next(((part, way) for part, (way, _) in self._chosen.get(follower, {}).items()
                      if part.traced.capture is capture), None)
        if not opened or found is None:
            leader._close()
            return
        step.forward_over(opened[-1], follower, *found)

    # -- sharing --------------------------------------------------------------------------

    def _share_out(self, now: Signature, ranks: Ranks | None) -> None:
        """Share the budget out, if a step of this signature was measured. `ranks`: all take the largest
        figures of any, and if there is no plan for one of them, all raise."""
        if ranks is not None:
            own = now.rest or next((s.rest for s in self._all if s.rest is not None), None)
            told = [text for text in ranks.told(
                _WAITS if self._whole_gradients else "" if own is None else own.row()) if text]
            if _WAITS in told or not told:          # nothing was measured: all steps were evaluations
                self._agreed += 1
                return
            if now.rest is not None:
                now.rest = functools.reduce(
                    Rest.together, map(now.rest.read, told), now.rest).least(now.earlier)
            else:
                now.rest = now.earlier              # it could not be measured again
        refused: InfeasibleBudget | None = None
        if now.rest is not None and not now.is_shared:
            try:
                with shows_signs(alone=ranks is None):
                    self._share(now)
            except InfeasibleBudget as error:
                if ranks is None and (several_ranks() or now.checked):  # others wait in a collective
                    warn(f"{error}. Its steps take that")
                    now.is_refused(error.minimum_bytes or 0)
                else:
                    refused = error
        if ranks is not None:
            limit = 0 if refused is None else self._budget_of(now)
            needs = [tuple(map(int, text.split(","))) for text in ranks.told(
                "" if refused is None else f"{refused.minimum_bytes},{limit}") if text]
            least = max((needed for needed, _ in needs), default=None)
            if needs and self._again and all(needed <= CLOSE * given for needed, given in needs):
                self._again, self._agreed = self._again - 1, self._agreed + 1
                self._warn_over(now, "The next step is measured, too")
                now.rest, now.is_shared, now.earlier = None, False, now.rest
                return
            if least is not None:
                raise refused or InfeasibleBudget(
                    f"{self._type}: no plans of its layers on another rank "
                    f"keep to the budget: the smallest that can be met there is about {least:,} bytes", least)
        elif refused is not None:
            raise refused
        self._warn_over(now, "From now on, its layers have plans for that budget")

    def _make_room(self, standing: int) -> None:
        """Plan again, with room for whole gradients: a step before has exchanged none. `standing`: their
        bytes, at most."""
        shared = [s for s in self._all if s.is_shared and s.rest is not None]
        kept = (f"up to {standing:,} bytes of whole gradients, which stay in memory until a backward "
                "exchanges them (set_requires_gradient_sync(True); for FSDP1, outside of no_sync)")
        (warn if shared else logger.warning)(
            f"{self._type}: its last backward has exchanged no gradients, and leaves {kept}. "
            + "".join(f"They come on top of the budget of {budget:,} bytes now. " for budget in
                      set(map(self._budget_of, shared)))
            + "The next step that exchanges them is measured, and later steps have plans that leave room for "
            "them. To have all of the budget for the layers, exchange gradients in each backward (after an "
            "exception in a step, call reset_iter_state() first, or none are exchanged any more)")
        if not self._standing:
            self._too_large += (f". This is with {kept}: exchange gradients in each backward, and the budget "
                                "needs no room for them")
        self._standing = standing
        for signature in self._all:
            signature.start_again()
        for follower, chosen in [pair for m in self._of_step for pair in m._chosen.items()]:
            chosen.update({part: (part.first, part.example) for part in chosen})
            follower.cache.follow([p for _, p in chosen.values()])

    def _warn_over(self, now: Signature, then: str) -> None:
        """Warn if the step that was measured, or the one that has planned its calls, has exceeded the
        budget."""
        budget = self._budget_of(now)
        if now.planning_took > budget > 0:
            warn(f"{self._type}: the first step of a new shape, or with new plans, has taken "
                 f"{now.planning_took:,} bytes of the budget of {budget:,}, with gradients that were not "
                 "there before. It holds as little as is known until such a step was measured")
        if budget:      # else it is a fraction, and judged once a step was measured
            now.planning_took = 0
        taken, now.taken = now.taken, 0
        if taken > budget > 0:
            warn(f"{self._type}: the step that was measured has taken {taken:,} bytes of the "
                 f"budget of {budget:,}. {then}")

    def _budget_of(self, now: Signature) -> int:
        """Return the budget of a step, the smallest of its models'; 0 if it is a fraction, and the step was
        not measured."""
        budgets = [m.planning.budget for m in {self, *(follower.within for follower, _ in now.observed)}]
        return min((b.bytes or 0) if now.rest is None else b.of(now.rest.plain) for b in budgets)

    def _share(self, now: Signature) -> None:
        """Share the budget out among the calls of a step, and of those with calls of the same modules. Raises
        `InfeasibleBudget`: the plans that take least together are followed then."""
        rest, now.is_shared = now.rest, True
        assert rest is not None
        budgets = {s: m._budget_of(s) for m in [self, *_models.values()] for s in m._all}
        alike = tied(now, [s for s in budgets if s.is_shared and s.rest is not None])
        calls = Counter(now.observed)
        for other in alike:
            calls |= Counter(other.observed)
        numbers = {call: k for k, call in enumerate(calls)}

        def moments(budget: int) -> list[Moment]:
            """Return the bounds on all schedules, as if each step had the budget of this one."""
            return [replace(m, bytes=m.bytes + (0 if s is now else budget - budgets[s])) for s in alike
                    for m in bounds(s.rest or rest, [numbers[call] for call in s.observed])]

        def shared_out(budget: int) -> Shared:
            return self._shared_out([part for _, part in calls], [
                Item(part.ways, count) for (_, part), count in calls.items()], rest, budget,
                moments(budget))

        budget = budgets[now]
        share, _ = room_for([part.whole for _, part in calls], moments(budget), budget)
        for part in {part for _, part in calls}:
            part.look(max(0.0, share))
        try:
            shared = shared_out(budget)
        except InfeasibleBudget as error:
            shared = shared_out(least := error.minimum_bytes or 0)
            self._follow(tuple(calls), shared)
            raise InfeasibleBudget(f"{error}{self._most_needed(tuple(calls), shared, moments(least))}",
                                   error.minimum_bytes) from None
        self._follow(tuple(calls), shared)
        now.begin_checks()
        for signature in budgets:
            if signature is not now and (signature in alike or signature not in self._all):
                signature.check_again()         # a step of several models may take more now
        logger.warning("%s: from this step on, a step takes about %s bytes of the budget of %s. "
                       "Outside of all plans are up to %s bytes (gathered parameters, their gradients, "
                       "buffers of the exchange)", self._type, f"{shared.taken:,}",
                       f"{budget:,}", f"{max(rest.figures[:3]):,}")

    def _most_needed(self, calls: Sequence[tuple[Follower, Part]], shared: Shared, moments: Sequence[Moment]
                     ) -> str:
        """Return which call runs when a step takes most, for the end of a message."""
        ways = [part.ways[number] for (_, part), number in zip(calls, shared.choice.ways, strict=True)]
        most = max(moments, key=lambda m: m.taken(ways))
        who, own, on_top = "no planned layer", 0, ""
        if most.running is not None:
            follower, own = calls[most.running][0], ways[most.running].extra
            who = next((name for name, m in follower.within._model.named_modules() if m is follower.original),
                       "") or "the rest of the forward, after the last sharded module,"
            who = who.replace(f".{INSIDE_OF_FLAT}", "")
            on_top = f", and {own:,} on top while it runs"
        held = most.taken(ways) - most.bytes - own
        return (f". Most is taken while {who} runs: {most.bytes:,} bytes outside of all plans, {held:,} that "
                f"planned calls hold until their backward{on_top}")

    def _follow(self, calls: Sequence[tuple[Follower, Part]], shared: Shared) -> None:
        """Let calls follow their parts of a budget."""
        for (follower, part), number, plan, extra in zip(calls, shared.choice.ways, shared.plans,
                                                         shared.extras, strict=True):
            chosen = follower.within._chosen[follower]
            chosen[part] = part.ways[number], plan
            self._warn_of_variant(part, number, "nothing else keeps to the budget, or this is faster",
                                  "keeps its bits")
            follower.cache.follow([p for _, p in chosen.values()])
            follower.cache.planning = replace(
                follower.cache.planning, budget=Budget(bytes=part.ways[number].saved + extra),
                settings=replace(follower.cache.planning.settings, loss_bytes=extra))
