"""A step of a sharded model, measured: what it shows of the bytes outside of the plans of its layers.

No plan knows what else a step takes: gathered parameters, their gradients, buffers of the exchange. So a step
is measured from moment to moment, and what the planned calls hold at each is taken off.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rkmate.device.events import OpenRun
from rkmate.device.protocol import PartsMeter
from rkmate.errors import CaptureError
from rkmate.parts.observed_step import MOST
from rkmate.parts.one_budget import Part, Rest
from rkmate.planners.several_calls import Moment, Way
from rkmate.runtime.kept_plans import Specialization
from rkmate.runtime.module import PlannedModule
from rkmate.runtime.segments import Call
from rkmate.torch_seam.dtensor import is_dtensor, local_part
from rkmate.torch_seam.modules import (
    flat_gradients,
    gathered_bytes,
    gathered_registered,
    is_sharded,
    whole_gradient_type,
)
from rkmate.torch_seam.tensors import after_backward, key_of

PATIENCE = 8
"""Steps that are measured, at most, in case one of them makes the calls of a step that was not measured when
it came. Each time that such a step comes again without being measured, as many again as before."""
KEPT = 64
"""Kinds of steps that begin with equal calls, and kinds of first calls, that are known at once."""
EVALUATIONS = 8
"""Steps without a backward (evaluation that records gradients) in a row, from which on such steps are not
measured."""
CHECKS = 3
"""Steps that follow the shared budget and are measured, until one keeps to it."""


class Follower(PlannedModule):
    """A planned call of a sharded layer, or of the rest of a forward."""

    _FIELDS = PlannedModule._FIELDS | {"_within"}
    _within: Any
    """The planner of the model (`rkmate.parts.sharded.Sharded`), or None."""

    def _new_signature(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
                       ) -> Specialization | None:
        if self._within is not None and key not in self._unplanned \
                and self._has_something_to_train(args, kwargs):
            with self._within.planning_apart():
                try:
                    key = self._within.provide(self, key, args, kwargs)
                except CaptureError as error:
                    self._leave_unplanned(key, error)
                    return None
                return super()._new_signature(key, args, kwargs)
        return super()._new_signature(key, args, kwargs)

    def trains(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call has something to train."""
        return self._has_something_to_train(args, kwargs)

    def _refuse_around(self) -> None:
        if self._within is None:            # else it is a layer of a model that FSDP1 may have sharded
            super()._refuse_around()

    def _tell_of_sum(self, number: int, advice: str = "") -> None:
        super()._tell_of_sum(number, advice if self._within is None else
                             "Each sharded layer has a plan of its own, which adds up the layer's part first")

    def _run_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._within is None or not self._has_something_to_train(args, kwargs):      # a frozen layer
            return super()._run_planned(args, kwargs)
        with gathered_registered(self._original), self._within.running(self):
            return super()._run_planned(args, kwargs)

    @property
    def within(self) -> Any:
        """The planner of the model (`rkmate.parts.sharded.Sharded`)."""
        assert self._within is not None
        return self._within

    @property
    def cache(self) -> Any:
        """The plans."""
        return self._plans

    @property
    def reader(self) -> Any:
        """The reader of the module's guards."""
        return self._reader


@dataclass(eq=False)
class Signature:
    """The calls of sharded models in one step, each with its arguments except for values, and what such steps
    have shown. A call that may be followed by others is a step of its own."""

    tail: int | bool | None = None
    """The number of calls of sharded modules after which the rest is planned; False if it is not; None: not
    known yet."""
    family: list[Signature] = field(default_factory=list)
    """The steps that begin with the same call, the one that ends with it first."""
    further: dict[Any, Signature] = field(default_factory=dict)
    """A further call -> the step that goes on with it."""
    number: int = 1
    """The number of calls of the step."""
    calls: int = 0
    """Steps that were begun with this call."""
    rest: Rest | None = None
    """Memory outside of all plans, once a step was measured that has exchanged its gradients."""
    unexchanged: Rest | None = None
    """Memory outside of all plans in the steps measured before, which have exchanged no gradients."""
    unexchanged_at: set[int] = field(default_factory=set)
    """Versions of the parameters at which such steps were measured."""
    exchanges: bool | None = None
    """Whether a step has exchanged its gradients; False: none has, in several versions of the parameters."""
    observed: list[tuple[Follower, Part]] = field(default_factory=list)
    """The planned calls of the step that was measured."""
    is_shared: bool = False
    """Whether the budget was shared out."""
    earlier: Rest | None = None
    """Memory outside of all plans in earlier measurements, if it was too much."""
    taken: int = 0
    """Bytes that the measured step has taken on this rank."""
    planning_took: int = 0
    """Bytes that a step has taken on this rank in which calls were planned, without what planning takes."""
    checks: int = 0
    """Steps that are still measured, at most, to check those that follow the shared budget."""
    checked: Rest | None = None
    """Memory outside of all plans in the steps that check."""
    over: int = 0
    """Bytes that these have taken, at least; 0 before the first of them."""
    most_taken: int = 0
    """Bytes that these have taken, at most."""
    refused: int = 0
    """The smallest budget that can be met, where steps take that, and the given one is smaller."""
    untrained: int = EVALUATIONS
    """Steps that ended here since one in which a backward has come: evaluation is not measured for long."""
    missed: int = 0
    """Steps that were measured for this one, and that made other calls."""
    patience: int = PATIENCE
    """The largest number of such steps (`missed`)."""

    def __post_init__(self) -> None:
        self.family.append(self)

    def followed_by(self, key: Any) -> Signature:
        """Return the step that goes on with a further call."""
        found = self.further.get(key)
        if found is None:
            if len(self.family) >= KEPT:
                self.family[0].further.clear()
                del self.family[1:]
            found = self.further[key] = Signature(number=self.number + 1, family=self.family)
        return found

    def ends(self, is_trained: bool, has_new_parts: bool, kept_whole: bool) -> None:
        """Note that a step has ended here. `is_trained`: whether a backward has come; `has_new_parts`: calls
        that had no plans before; `kept_whole`: whether it has exchanged no gradients."""
        self.untrained = 0 if is_trained else self.untrained + 1
        exchanges_now = is_trained and not kept_whole
        if has_new_parts or (self.exchanges is False and exchanges_now):
            self.start_again()
        self.exchanges = exchanges_now or self.exchanges
        if self.rest is None and self.missed >= self.patience:
            self.missed, self.patience = 0, 2 * self.patience

    def wanted(self, is_comparable: bool) -> list[Signature]:
        """Return the steps that begin with the same call, and are to be measured. `is_comparable`: whether as
        many gradients are in memory as in those that were measured before."""
        return [s for s in self.family if s.untrained < EVALUATIONS and s.missed < s.patience and (
            s.rest is None or (s.checks and is_comparable))]

    def has_come_for(self, others: Iterable[Signature]) -> None:
        """Note that a step with these calls was measured, for itself or for others."""
        self.missed = 0
        for other in others:
            other.missed += other is not self

    @property
    def is_begun(self) -> bool:
        """Whether a step that begins with this call was the first such one, or is trained."""
        return not self.calls or any(s.untrained < EVALUATIONS for s in self.family)

    @property
    def next_shared(self) -> Signature:
        """The next step that begins with this call, and for which the budget is to be shared out."""
        waits = [s for s in self.family if not s.is_shared]
        return next((s for seen in ("rest", "earlier") for s in waits if getattr(s, seen) is not None), self)

    def start_again(self) -> None:
        """Forget what was measured: the next step is measured again."""
        self.rest, self.is_shared, self.checks, self.checked, self.missed = None, False, 0, None, 0
        self.refused = 0

    def note(self, step: Observed, kept_whole: bool, budget: int, version: int) -> None:
        """Note what a measured step has shown. `kept_whole`: whether it has exchanged no gradients. Steps are
        measured until one has, as that takes buffers, and lets whole gradients go; or until none has in two
        versions of the parameters, as other microbatches exchange them. `version`: of the parameters."""
        found = step.rest()
        if self.is_shared:
            self._check(found, step.peak, max(budget, self.refused))
            return
        if found is not None and self.unexchanged is not None:
            found = found.together(self.unexchanged)
        if kept_whole:
            self.unexchanged_at.add(version)
        if len(self.unexchanged_at) > 1 and self.exchanges is None:
            self.exchanges = False
        waits = kept_whole and self.exchanges is not False
        self.rest, self.unexchanged = (None, found) if waits else (found, None)
        if found is not None:
            self.observed = [(follower, part) for follower, part, _ in step.calls]
            self.taken = max(self.taken, step.peak)

    def begin_checks(self) -> None:
        """Note that the next step follows the shared budget."""
        self.checks, self.over, self.most_taken, self.refused = 0 if self.checked else CHECKS, 0, 0, 0

    def is_refused(self, least: int) -> None:
        """Note that the next step takes more than the budget: the least that it can take, which is checked,
        too."""
        self.begin_checks()
        self.refused, self.taken = least, 0

    def check_again(self) -> None:
        """Measure the next steps: another model may hold more in them now."""
        if self.is_shared:
            self.checks, self.checked, self.over, self.missed = CHECKS, None, 0, 0

    def _check(self, found: Rest | None, peak: int, budget: int) -> None:
        """Note what a step has shown that follows the shared budget. If all that are measured exceed it, what
        they have shown counts for the next ones: gloo's threads may let go of buffers late in one of them."""
        first, self.checks = not self.over, self.checks - 1
        if found is None or self.rest is None:
            return
        self.most_taken = max(self.most_taken, peak)
        self.over, self.checked = peak if first else min(peak, self.over), found.least(self.checked)
        if self.over <= budget:
            self.checks = 0
        elif not self.checks:
            self.rest, self.is_shared, self.taken = self.rest.together(self.checked), False, self.over


class Exchanges:
    """Sees whether backwards exchange the gradients of sharded parameters. FSDP2 keeps the whole gradients of
    a backward that does not (`set_requires_gradient_sync(False)`) on each rank until one does."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}
        """For the id of each parameter, the parameter, and a hook that runs when it gets its gradient."""
        self._places = [(m, name) for m in model.modules() for name, p in m.named_parameters(recurse=False)
                        if is_dtensor(p)]
        """The modules and names of sharded parameters."""
        self._types: dict[int, torch.dtype] = {}
        """For the id of each parameter, the type of its whole gradient."""
        self.has_come = self._trains = self._exchanged = False
        """Whether a backward of this step has come, whether it trains this model, and whether one has
        exchanged gradients."""
        self._local = 1.0
        self.standing = 0
        """Bytes of whole gradients that were in memory when the step began, at most."""

    def step_begins(self) -> None:
        """Note that a step begins."""
        if self._trains:
            self.standing = self._whole_bytes() if self.are_kept_whole else 0
        self.has_come = self._trains = self._exchanged = False
        for module in filter(is_sharded, self._model.modules()):    # inner ones after those around them
            kept = whole_gradient_type(module)
            for p in module.parameters():
                self._types[id(p)] = kept or p.dtype
                known = self._hooks.get(id(p))
                if p.requires_grad and is_dtensor(p) and (known is None or known[0]() is not p):
                    self._hooks[id(p)] = weakref.ref(p), p.register_post_accumulate_grad_hook(self._note)

    @property
    def are_kept_whole(self) -> bool:
        """Whether the backward of this step has come, and has exchanged no gradients."""
        return self._trains and not self._exchanged and bool(self._hooks or flat_gradients(self._model))

    @property
    def gathered(self) -> int:
        """Bytes of the sharded parameters that are gathered now."""
        by_layers: int = sum(p.nbytes for module, name in self._places
                             if not is_dtensor(p := getattr(module, name)))
        return by_layers + gathered_bytes(self._model)

    def watch(self, call: Call, layer: nn.Module) -> None:
        """Note, after the forward of a planned call, when its backward is over. `layer`: gathered now."""
        own = [p for p in layer.parameters() if p.requires_grad]
        if own:
            held = sum((local_part(p.detach()) if is_dtensor(p) else p).numel() for p in own)
            self._local = min(self._local, held / max(1, sum(p.numel() for p in own)) or 1.0)
        finished = call.finished

        def over() -> None:
            self.has_come = True
            # The backward of a frozen layer goes on to what is trained, here or in another model.
            self._trains |= bool(own) or any(p.requires_grad for p in self._model.parameters())
            if finished is not None:
                finished()

        call.finished = over

    def _note(self, _: torch.Tensor) -> None:
        self._exchanged = True

    def _whole_bytes(self) -> int:
        """Return the bytes of all whole gradients. Those of a parameter that is tensor-parallel as well are
        parts."""
        known = [p for ref, _ in self._hooks.values() if (p := ref()) is not None]
        return flat_gradients(self._model) + int(
            self._local * sum(p.numel() * self._types[id(p)].itemsize for p in known))

    def close(self) -> None:
        """Remove all hooks."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._types.clear()


class Observed:
    """A step in which memory is measured from moment to moment."""

    def __init__(self, meter: PartsMeter, standing: int, *, goes_on: bool = False) -> None:
        """`standing`: bytes that were in memory before, and belong to the step. `goes_on`: further
        calls may come when the backward of all before them is over. Raises `MeterError` where something else
        measures."""
        self._goes_on = goes_on
        self.standing = standing
        """Bytes that were in memory when the step began, and belong to it."""
        self._run = OpenRun(meter, self._give_up)
        self._stretches: list[tuple[int | None, tuple[int, ...]]] = []
        """For each stretch of the step, the number of the planned call that runs, and of those that hold."""
        self._arriving: dict[int, int] = {}
        """Stretch in which a backward begins -> the bytes of the gradients that it is given."""
        self._holding: dict[int, None] = {}
        self.calls: list[tuple[Follower, Part, Way]] = []
        """The planned calls, and what each follows."""
        self._waits = self._has_come = self._is_over = self._is_paused = False
        self._next(None)

    def _next(self, running: int | None) -> None:
        if self._is_over:
            return
        self._run.begin_part(len(self._stretches))
        self._stretches.append((running, tuple(self._holding)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Plan a call inside the context, in the middle of the step. What that takes while it runs does not
        count."""
        if self._is_over or not self._run.may_go_on():
            yield
            return
        self._run.end_part()
        self._is_paused = True
        try:
            with self._run.meter.paused():
                yield
        finally:
            self._is_paused = False
            self._run.give_way_by(self._give_up)
            self._next(None)

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
                after_backward(self._backward_over)
            self._holding.pop(number, None)
            self._next(number)
            given = {key_of(g): g.untyped_storage().nbytes() for g in grads if g is not None}
            self._arriving[len(self._stretches) - 1] = sum(given.values())
            if begins is not None:
                begins(grads)

        def over() -> None:
            self._next(None)
            if finished is not None:
                finished()

        call.begins, call.finished = began, over

    def _end(self) -> None:
        self._is_over = True
        self._run.end_part()

    def _backward_over(self) -> None:
        """A backward is over. If it was that of all calls, the measurement goes on until another one begins:
        what a thread has begun, autograd's engine gives it back after this."""
        if self._holding or self._goes_on:
            self._waits, self._has_come = False, True
            return
        self._end()
        self._run.give_way_by(self._give_way)

    def _give_up(self) -> None:
        """Something else is to be measured, in the middle of the step: this shows nothing, then."""
        if self._is_paused:
            return
        self._waits = False
        self._end()
        self._give_way()

    def _give_way(self) -> None:
        if self._run.may_go_on():
            self._run.close()

    def close(self, is_over: bool = False) -> None:
        """End the measurement. `is_over`: no backward comes for calls that hold something still."""
        if self._has_come and (is_over or not self._holding):
            self._waits = True
            self._holding.clear()
        self._end()
        self._run.close()

    @property
    def peak(self) -> int:
        """Bytes of the step, at most."""
        return max((peak for _, peak in self._levels().values()), default=0)

    def _levels(self) -> dict[int, tuple[int, int]]:
        return {k: (begin + self.standing, peak + self.standing)
                for k, (begin, peak) in self._run.meter.levels().items()}

    def rest(self) -> Rest | None:
        """Return what was outside of all plans; None if the backward has not come to its end."""
        if not self._waits or self._holding:
            return None
        levels = self._levels()
        beside = alone = early = plain = 0
        moments: dict[tuple[int | None, tuple[int, ...]], int] = {}
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
                base = max(begin - own - self._arriving.get(k, 0), peak - way.saved - way.extra) - held
                beside = max(beside, base - absent)
                plain = max(plain, base + whole + part.whole.saved + part.whole.extra)
            else:
                running = None
                base = peak - held
                plain = max(plain, base + whole)
                if holding:
                    alone = max(alone, base - absent)
                else:
                    early = max(early, base)
            moments[running, holding] = max(base, moments.get((running, holding), 0))
        return Rest(beside, alone, early, plain, moments if len(self.calls) <= MOST else {})

    def _of_backward(self, stretch: int) -> set[int]:
        """Return the calls that have run before a stretch."""
        return {n for n, _ in self._stretches[:stretch] if n is not None}


def bounds(rest: Rest, item_of: Sequence[int]) -> list[Moment]:
    """Return the moments of a step as bounds on schedules. `item_of`: the item of each call. If they are not
    told apart, all calls hold what they save at each moment."""
    held = Counter(item_of)
    return [Moment(size, Counter(item_of[n] for n in (*holding, *(() if running is None else (running,)))),
                   None if running is None else item_of[running])
            for (running, holding), size in rest.moments.items()] or [
        Moment(rest.early, {}), Moment(rest.alone, held), *(Moment(rest.beside, held, k) for k in held)]


def tied(now: Signature, others: Sequence[Signature]) -> list[Signature]:
    """Return a step, and others with calls of the same modules, or with calls of theirs: each call follows
    one schedule in all of them."""
    found, calls = [now], set(now.observed)
    left = [s for s in others if s is not now]
    while more := [s for s in left if calls & set(s.observed)]:
        found += more
        left = [s for s in left if s not in more]
        calls.update(*(s.observed for s in more))
    return found
