"""By parts: a model that cannot be planned as a whole trains with plans for the submodules that can be.

The first step runs as it is, and is observed: which submodules can be captured (the outermost ones that can),
how often each is called, what it keeps for the backward, and what the rest of the step keeps. From then on
these submodules follow plans. All of them, and the rest, share one budget.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from torch import nn

from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.errors import ArgumentError, CaptureError, InfeasibleBudget, RkmateError
from rkmate.graph.capture.collectives import groups_of
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.graph.capture.state import BuffersAndDraws
from rkmate.graph.capture.structure import take_apart
from rkmate.parts.followed_parts import MEASURED, FollowedParts
from rkmate.parts.kinds import (
    Asked,
    Kind,
    Put,
    growth_of_rest,
    is_named,
    is_worth_looking_at,
    kind_key,
    modules_of,
    outermost,
    sizes_in,
    why_not,
)
from rkmate.parts.moments import STEPS, SeenStep, bounds, kept_of, room_for, seen
from rkmate.parts.observed_step import ObservedStep
from rkmate.parts.one_budget import (
    Part,
    Rest,
    Shared,
    Watch,
    is_unobserved,
    take_watch_from,
    undisturbed,
)
from rkmate.parts.one_decision import OneDecision
from rkmate.pipeline.part_plans import with_terms
from rkmate.pipeline.prepare import trace
from rkmate.planners.several_calls import Moment, Way
from rkmate.runtime.agreement import shows_signs
from rkmate.runtime.followed_step import FollowedStep
from rkmate.runtime.guards import ModuleReader, guards_of
from rkmate.runtime.kept_plans import Planning, Prototype
from rkmate.support.planning_lock import planning_lock
from rkmate.support.progress import Progress
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.modules import compiled_call, own_call
from rkmate.torch_seam.patches.libraries import records_apart
from rkmate.torch_seam.tensors import version_of

logger = logging.getLogger("rkmate")

WORTH = 0.02
"""The share of what a step keeps for the backward that a kind of part has to keep, to be planned."""
FULL = 0.97
"""The share of what calls hold that schedules are looked for with, at most, where not all of it fits."""
NEAR = 1.25
"""The estimate of a step as it is, divided by its budget, up to which it is measured before it is refused."""
SIZES = 4
"""The number of sizes of calls that submodules of a kind are captured for; calls of further sizes count by
the bytes that they save."""


class Parts(FollowedParts):
    """The parts of one model."""

    _too_large = ("{name} is planned by parts, and no schedules of them fit in {budget:,} bytes: the rest of "
                  "the step takes {outside:,}, and the smallest budget that can be met is {least:,} bytes "
                  "({share:.0%} of its own peak of about {plain:,} bytes){why}")
    _plain_is_fallback = True

    def __init__(self, model: nn.Module, planning: Planning, put: Put,
                 take: Callable[[nn.Module], None]) -> None:
        """`take`: takes away what `put` has put into a submodule."""
        super().__init__(model, planning)
        self._put, self._take = put, take
        chosen = planning.settings.parts
        self.named = chosen if isinstance(chosen, tuple) else ()
        """Names and patterns of the only parts to plan; empty where they are looked for."""
        self.active = bool(self.named)
        """Whether calls of the model itself run it as it is, with plans for parts."""
        for pattern in self.named:
            if not any(fnmatchcase(n, pattern) for n, _ in model.named_modules()):
                raise ArgumentError(f"parts names {pattern!r}, and {self._type} has no such submodule")
        self._error: CaptureError | None = None
        self._alike: dict[object, list[Kind]] = defaultdict(list)
        """Kinds by what their submodules have in common."""
        self._step: ObservedStep | None = None
        self._steps = self._inside = 0
        self._rest = Rest(0, 0, 0, 0)
        """Memory outside of the parts, the most of all observed steps."""
        self._seen_steps: list[SeenStep] = []
        self._has_steps = False
        """Whether a call of the model makes whole steps, with backwards of its own: it is none of a step, and
        those that it makes are planned."""
        self._ignores = False
        """Whether the model itself runs, which is not planned by parts."""
        self._seen: set[int] = set()
        """Ids of the submodules that were called."""

    # -- calls ----------------------------------------------------------------------------

    def instead(self, error: RkmateError) -> bool:
        """The model cannot be planned as a whole: where it cannot be captured, its calls are planned by
        parts."""
        if not isinstance(error, CaptureError):
            return False
        if not self.active:
            self.active, self._error = True, error
            self._forget()
        return True

    def watch_methods(self) -> None:
        """Observe calls of submodules from elsewhere than a planned call: a method other than the forward."""
        self.watch(filter(is_worth_looking_at, outermost(self._model)))

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Around a call of a model that is planned as a whole, and runs as it is this time."""
        before, self._ignores = self._ignores, True
        try:
            yield
        finally:
            self._ignores = before

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model, by parts."""
        if is_unobserved() or self._has_steps:
            return call(*args, **kwargs)
        self._one.raise_noted()
        try:
            self._next_step()
        except InfeasibleBudget as error:
            if not self._one.leaves_note(error):
                raise
            self._forget()
            logger.warning("%s. This step runs as it is; after it, all ranks raise this error", error)
            return call(*args, **kwargs)
        if self._is_planned:
            called = call(*args, **kwargs)
            return called if self._followed is None else self._followed.follow(called)
        if self._step is None:
            self._tell_beginning(None)
        self.watch(filter(is_worth_looking_at, self._model.modules()))
        before, trained = BuffersAndDraws(self._model), self._trained()
        try:
            with self._one.looks():
                result = self._observed(call, args, kwargs)
            if self._trained() != trained and not any(t.requires_grad for t in tensors_in(result)):
                self._begin_steps_inside()
                return result
            with self._one.refusals():
                self._check_worth()
        except BaseException as error:
            self._forget()
            if isinstance(error, CaptureError):
                before.restore()
                self.active = bool(self.named)
            raise
        return result

    def _trained(self) -> list[Any]:
        """Return what a backward or an optimizer's step changes."""
        return [(version_of(p), p.grad is None or (id(p.grad), version_of(p.grad)))
                for p in self._model.parameters()]

    def _begin_steps_inside(self) -> None:
        """Plan the calls that a call of the model makes: it computes gradients itself, and no backward comes
        for its result."""
        self._has_steps = True
        self._forget()
        self._one = OneDecision(self._model)        # its backwards have communicated
        self.watch_methods()

    def called_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a submodule that is watched."""
        call = own_call(module)
        if self._ignores:
            return call(*args, **kwargs)
        self._seen.add(id(module))
        if not self._inside:                    # by a method of the model, or by whoever holds the submodule
            self._next_step(may_go_on=True)
            if not isinstance(now := compiled_call(module), Watch):
                return (now or call)(*args, **kwargs)       # planned now
        if self._is_planned:                    # it was in no step before: the next one is observed
            self._again, self._has_others = not self._one.is_of_ranks, True
            return call(*args, **kwargs)
        if not self._inside:
            self._tell_beginning(module)
            self.watch(filter(is_worth_looking_at, module.modules()))
        if self._inside and self._step is not None and self._step.is_inside_part:
            return call(*args, **kwargs)
        kind = self._kind_of(module, args, kwargs)
        if kind.part is None:
            return call(*args, **kwargs) if self._inside else self._observed(call, args, kwargs)
        if not self._inside:
            return self._observed(lambda *a, **k: self._part(kind, module, a, k), args, kwargs)
        return self._part(kind, module, args, kwargs)

    def _observed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call from outside, and what it and its backward keep."""
        if self._step is None:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            place = devices.common([*tensors, *tensors_in((args, kwargs))])
            self._steps += 1
            place.warm_up()                     # what libraries keep is not of the step
            self._step = ObservedStep(tensors, place.parts_meter())
        step = self._step
        self._inside += 1
        try:
            with step.outermost((args, kwargs)):
                result = call(*args, **kwargs)
                if self._inside == 1:
                    step.result(result, (args, kwargs))
                return result
        finally:
            self._inside -= 1

    def _part(self, kind: Kind, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self._step
        assert step is not None
        tensors = take_apart((args, kwargs), result=False)[0]
        with step.part(tensors) as call:
            result = own_call(module)(*args, **kwargs)
        step.returned(call, kind.results(result, args, kwargs, len(tensors)))
        for known in self._alike[kind.key]:
            if known.observed_in != self._steps:
                known.observed_in = self._steps
                known.calls.clear()
        kind.calls.append((module, call))
        return result

    @records_apart()
    def _kind_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """The kind of a submodule; a new one is captured."""
        key = kind_key(module)
        if not is_named(module, self._model, self.named):
            return Kind(type(module).__name__, key)
        alike, sizes = self._alike[key], sizes_in(args, kwargs)
        guards = guards_of(ModuleReader(module), args, kwargs)[0] if any(k.part for k in alike) else None
        kind = next((k for k in alike if k.why or (
            k.sizes == sizes and guards is not None and k.takes(guards))), None)
        if kind is None and len(alike) >= SIZES:
            kind = next((k for k in alike if k.sizes == sizes), alike[0])
        if kind is None or (kind.part is not None and kind.given is None):
            known, kind = kind, kind or Kind(type(module).__name__, key)
            if not any(p.requires_grad for p in module.parameters()) and \
                    not any(t.requires_grad for t in tensors_in((args, kwargs))):
                return kind                     # nothing to train here, perhaps elsewhere
            try:
                with undisturbed(), contextlib.nullcontext() if self._step is None else self._step.apart():
                    refuse_what_cannot_repeat(module, args, kwargs)
                    guards = guards or guards_of(ModuleReader(module), args, kwargs)[0]
                    traced = trace(module, args, kwargs, self._settings("all"), Progress(False))
                    like = None if known is not None else next(
                        (k for k in alike if k.sizes == sizes and k.note(guards, traced)), None)
                    if like is not None:
                        return like
                    kind.capture(module, guards, traced, args, kwargs)
            except RkmateError as error:
                if self.named:
                    raise
                kind.why = str(error)
            if known is None:
                alike.append(kind)
        return kind

    @property
    def _kinds(self) -> list[Kind]:
        return [k for alike in self._alike.values() for k in alike]

    def _why(self) -> str:
        return f". {why}" if (why := why_not(self._kinds)) else ""

    def _settings(self, trains: Any) -> Any:
        return replace(self.planning.settings, trains=trains)

    def _check_worth(self) -> None:
        """Raise the whole model's error where no part is worth a plan."""
        kept = 0 if self._step is None else self._step.kept
        found = [k for k in self._kinds if k.part is not None and k.calls]
        if self._error is not None and not any(k.saved >= WORTH * kept or k.is_checkpointed for k in found):
            raise self._error

    # -- steps ----------------------------------------------------------------------------

    def _next_step(self, may_go_on: bool = False) -> None:
        """Before a call from outside: plan what was observed, where its backward was. `may_go_on`: whether
        results of earlier calls may wait for another backward (a generator's, after a discriminator's)."""
        step, of_ranks = self._step, self._one.is_of_ranks
        if step is not None and not self._inside:
            step.finish()
        if of_ranks and (may_go_on or self._inside):        # ranks meet in calls of the model
            return
        if step is None and not self._inside:
            self._measure_followed()
        if self._again and not self._inside and (step is None or step.backward_seen):
            self._again = self._is_planned = False
            self._step = step = None
            self._stop_watching()
            for module in self.planned:
                self._take(module)
            self.watch_methods()
        if of_ranks and not self._is_planned:
            told = {seen for seen, in self._one.told(step is not None and step.backward_seen)}
            if len(told) > 1:               # some ranks had no backward: the next step is observed on all
                self._step = step = None
        if self._inside or step is None:
            return
        goes_on = may_go_on or self._looks_further
        if step.backward_seen and (
                not goes_on or step.ends_before_call(until_trained=self._looks_further)):
            self._step = None
            with shows_signs(alone=not of_ranks):
                self._plan(step)
        elif step.is_empty:             # its results were dropped
            self._step = None

    @planning_lock
    def _plan(self, step: ObservedStep) -> None:
        """Plan the parts of the step that was observed."""
        unseen = [m for m in self._watched if id(m) not in self._seen]
        self._growth = growth_of_rest(self._model, self.ran)
        self._stop_watching()
        saved = {key: sum(k.saved for k in alike) for key, alike in self._alike.items() if alike}
        kinds = [k for k in self._kinds if k.part is not None and k.calls and k.taught
                 and (saved[k.key] >= WORTH * step.kept or k.is_checkpointed)]
        kinds = self._that_all_plan(kinds)
        followed = {call.number for k in kinds for _, call in k.calls}
        others = [call for k in self._kinds if k not in kinds for _, call in k.calls]
        left = step.between + sum(kept_of(call, followed) for call in others)
        handed = sum(kept_of(call, followed) - kept_of(call, ()) for call in others)
        beside, alone, early = step.beside + left, step.alone + left + step.loss, step.early
        first = min((call.number for k in kinds for _, call in k.calls), default=0)
        for call in others:
            level = max(call.level + call.peak, call.backward) + left
            if call.number < first:
                early = max(early, level)
            else:
                alone = max(alone, level)
        modules = [modules_of(self._model, kind, kinds, lambda m: is_named(
            m, self._model, self.named)) for kind in kinds]
        with self._one.refusals():
            parts = [self._measured(kind, self.planning.budget.of(step.peak)) for kind in kinds]
        places = [(kind, part, module, calls) for kind, part, found in zip(kinds, parts, modules, strict=True)
                  for module, calls in found]
        # Gradients of several calls are added up, and wait for the last call's.
        counts: Counter[nn.Module] = Counter()
        for found in modules:
            counts.update(dict(found))
        waiting = sum(p.nbytes for m, calls in counts.items() if calls > 1
                      for p in m.parameters() if p.requires_grad)
        self._seen_steps = [*self._seen_steps, seen(step, [
            k for k in self._kinds if k.observed_in == self._steps])][-STEPS:]
        moments = bounds(self._seen_steps, [(kind, m, calls) for kind, _, m, calls in places], waiting)
        everything = {n: calls for n, (*_, calls) in enumerate(places)}
        known = moments or [Moment(alone, everything), *(Moment(beside, everything, n) for n in everything)]
        # Calls as they are, also those that were left out of the step.
        plain = [Way(0.0, ceil(kind.saved / len(kind.calls)),
                     part.whole.extra + kind.is_checkpointed * part.whole.saved) for kind, part, *_ in places]
        absent = sum(way.saved * calls for way, (*_, calls) in zip(plain, places, strict=True)) - sum(
            kind.saved for kind in kinds)
        most = step.peak + absent
        if step.meter is None or absent > len(places):      # not measured, or not with every call in it
            most = max(most, max((m.taken(plain) for m in known), default=0) - handed)
        budget = self.planning.budget.of(most)
        share, fits = room_for([part.whole for _, part, *_ in places], known, budget)
        share = share if fits else min(share, FULL)
        beside += waiting
        for part in parts:
            part.look(share)
        rest = self._rest = self._rest.together(Rest(beside, max(alone, beside), early, 0))
        if not self._one.all_say(bool(kinds)):
            self._nothing_worth(step)
            return
        before, self._asked = self._asked, Asked(
            step, kinds, [(kind, part, m) for kind, part, m, _ in places],
            [calls for *_, calls in places], share, rest._replace(plain=most), moments)
        self._over, self._to_measure = 0, MEASURED
        try:
            has_plans = self._share(self._asked, budget)
        except InfeasibleBudget as error:
            if before is None or not self._looks_further:
                raise
            self._warn_once("over", f"{error}. Steps have the plans of before, and take more")
            self._asked = before
            has_plans = self._share(before, budget)
        if has_plans:
            inside = {id(m) for part in self.planned for m in part.modules()}
            self.watch(m for m in unseen if id(m) not in inside and kind_key(m) not in saved
                       and any(p.requires_grad for p in m.parameters()))

    def _that_all_plan(self, kinds: Sequence[Kind]) -> list[Kind]:
        """Leave out kinds that communicate, and that not all ranks can plan: all follow one plan of these."""
        names = [{self._name(m) for m, _ in k.calls} if k.part is not None and groups_of(
            k.part.traced.capture.graph) else set() for k in kinds]
        common = self._one.common(set().union(*names))
        return [kind for kind, mine in zip(kinds, names, strict=True) if mine <= common]

    def _share(self, asked: Asked, budget: int) -> bool:
        """Share a budget out, and put plans into the parts; False where the step needs none. Each rank leaves
        as much to its parts as the one that can leave least, if it can keep its bits with that."""
        most, left = asked.rest.plain, budget - asked.outside
        told = self._one.told(left, most <= budget, most <= NEAR * budget)
        fits, near = (all(row[k] for row in told) for k in (1, 2))
        is_near, places = self.active and not self.planned and asked.is_estimate and near, asked.places
        planner = "" if fits or is_near else self.planning.planner
        try:
            with self._one.refusals():
                asked, shared = self._shared_alike(asked, left - min(row[0] for row in told), budget, planner)
        except InfeasibleBudget:
            if not fits and not is_near:
                raise
            if is_measured := asked.is_estimate and self.active:
                self._followed = FollowedStep(self._model.parameters(), asked.step.meter,
                                              is_whole=asked.step.is_trained)
            self._is_planned = True
            logger.warning("%s %s plans: a step takes about %s bytes as it is%s, and the budget is %s",
                           self._type, "needs no" if fits else "has no room for", f"{most:,}",
                           " (the next one is measured)" if is_measured else "", f"{budget:,}")
            for module in self.planned:
                self._take(module)
            self.planned = []
            return False
        followed: dict[nn.Module, list[tuple[Kind, Prototype, int]]] = defaultdict(list)
        reason = f"nothing fits in the budget of {self._type} with the original's operations of "
        for (kind, part, module), number, plan, extra in zip(places, shared.choice.ways, shared.plans,
                                                             shared.extras, strict=True):
            followed[module].append((kind, plan, extra))
            self._warn_of_variant(part, number, reason + kind.name, "refuses such budgets")
        for module, mine in followed.items():
            self._put_into(module, mine, shared, sum(asked.calls))
        self.planned = list(followed)
        self._is_planned, self._peak, self._spare = True, shared.taken, shared.budget - shared.taken
        self._tell_of(asked, shared)
        for kind in self._kinds:
            if kind.part is not None:
                kind.part.traced, kind.given = replace(kind.part.traced, tensors={}), None
        return True

    def _shared_alike(self, asked: Asked, more: int, budget: int, planner: str) -> tuple[Asked, Shared]:
        """Share a budget out with more bytes outside of all plans, where that keeps the bits; without them
        otherwise."""
        if more:
            with contextlib.suppress(InfeasibleBudget):
                larger = asked.with_more_outside(more)
                return larger, larger.shared_out(self._shared_out, budget, "")
        return asked, asked.shared_out(self._shared_out, budget, planner)

    def _nothing_worth(self, step: ObservedStep) -> None:
        """No part of the step is worth a plan."""
        error, why = self._error, why_not(self._kinds)
        self._forget()
        self.active = bool(self.named)
        if error is not None:
            raise error
        if step.kept > WORTH * self.planning.budget.of(step.peak):
            warn(f"{self._type} is called through other methods than its forward, and nothing of that can be "
                 f"planned: it keeps {step.kept:,} bytes for the backward, outside of the budget. {why}")

    def _measured(self, kind: Kind, budget: int) -> Part:
        """Return what was captured of a kind, with its schedules. `budget`: bytes that measuring may take."""
        part = kind.part
        assert part is not None
        if not part.forms:
            kind.lay_out(self._settings("all"))
        wanted = tuple(k in kind.taught for k in range(len(part.traced.wanted)))
        if not part.forms or part.traced.wanted != wanted or kind.shared - kind.known_shared \
                or part.dropped - kind.dropped:
            kind.known_shared = kind.shared
            part.traced = replace(part.traced, wanted=wanted, settings=self._settings(kind.taught),
                                  capture=with_terms(part.traced.capture, kind.shared))
            part.dropped = kind.dropped
            part.look_anew(self.planning.planner, budget)
        return part

    def _put_into(self, module: nn.Module, found: Sequence[tuple[Kind, Prototype, int]], shared: Shared,
                  calls: int) -> None:
        """`found`: plans, each for calls of other sizes, with bytes that they may take while they run.
        `calls`: of all parts in a step."""
        take_watch_from(module)
        extra, left = min(e for *_, e in found), shared.budget - shared.taken
        """Bytes that a part may take while it runs, and bytes that no plan uses: for calls that differ from
        the planned ones."""
        # Calls may be smaller or larger than the one that was captured.
        room = max(int((plan.planned.plan.budget_bytes - own) * kind.sizes_of(module)[0])
                   for kind, plan, own in found)
        kind = found[0][0]
        settings = replace(self._settings("all"), loss_bytes=extra + left - left // calls)
        if settings.offload is not None:
            settings = replace(settings, offload=settings.offload.part(1, calls))
        self._put(module, replace(self.planning, budget=Budget(bytes=room + extra + left),
                                  settings=settings, shared_inputs=kind.known_shared,
                                  taught=frozenset(k for kind, *_ in found for k in kind.taught),
                                  over=functools.partial(self._refused, module, room=room + extra + left),
                                  more_calls=self._have_measured,
                                  calls_at_once=sum(m is module for k, *_ in found for m, _ in k.calls)),
                  tuple(plan for _, plan, _ in found), self._refused)

    def _refused(self, module: nn.Module, error: RkmateError, *, room: int | None = None) -> None:
        """A call of a part runs as it is, or follows a plan that needs more than some bytes (`room`)."""
        if room is not None and isinstance(error, InfeasibleBudget):
            self._more += error.minimum_bytes - room
        self._have_measured()
        name = self._name(module)
        self._warn_once(name, f"a call of {name} differs from the planned ones, and " + (
            f"runs as it is: {error}" if room is None else f"has the smallest plan that there is: {error}"))

    # -- what is said ---------------------------------------------------------------------

    def _tell_beginning(self, module: nn.Module | None) -> None:
        if self._asked is not None:
            logger.warning("This step of %s runs as it is, about %s bytes, and is measured", self._type,
                           f"{self._asked.rest.plain:,}")
        elif module is None and self._error is not None:
            logger.warning("%s. It is planned by parts: the first step runs as it is, and is measured",
                           str(self._error).rstrip("."))
        elif module is not None and "method" not in self._told:
            self._told.add("method")
            logger.warning("%s of %s is called from elsewhere than the module's forward: what can be planned "
                           "of it is planned by parts. The first step runs as it is, and is measured",
                           self._name(module), self._type)

    def _tell_of(self, asked: Asked, shared: Shared) -> None:
        kept = max(asked.step.kept, sum(k.saved for k in self._kinds))
        logger.warning(
            "%s is planned by parts: %s. That is %.0f%% of the %s bytes that a step as it is keeps for its "
            "backward. The rest takes up to %s bytes, a step at most about %s bytes of the budget of %s%s",
            self._type, asked.in_words(self._name),
            100 * sum(k.saved for k in asked.kinds) / max(1, kept), f"{kept:,}",
            f"{max((m.bytes for m in asked.moments), default=asked.rest.beside):,}",
            f"{shared.taken:,}", f"{shared.budget:,}", self._why())

    def _name(self, module: nn.Module) -> str:
        return next((n for n, m in self._model.named_modules() if m is module), type(module).__name__)

    # -- watching -------------------------------------------------------------------------

    def _stop_watching(self) -> None:
        super()._stop_watching()
        if self._followed is not None:
            self._followed.close()
            self._followed = None

    def _forget(self) -> None:
        """Observe nothing any more."""
        self._stop_watching()
        if self._step is not None:
            self._step.finish()
        self._step = None
        self._alike.clear()

    def take_away(self) -> None:
        """Leave every submodule as it was."""
        self._forget()
        for module in self.planned:
            self._take(module)
        self.planned = []
        self._is_planned = self.active = False
