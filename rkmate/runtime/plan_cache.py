"""Plans of a module by the calls that they are for: found, made, or derived from those for other sizes."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkmate.budget import Budget
from rkmate.codegen.emit import emit
from rkmate.device import MeterError
from rkmate.device.events import waits_for_backward
from rkmate.errors import InfeasibleBudget
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.capture.collectives import groups_of, outlines
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.ir.plan import in_one_line
from rkmate.offload.target import Engines
from rkmate.pipeline.following import follow, follow_any
from rkmate.pipeline.model import as_before
from rkmate.pipeline.part_plans import few_terms, terms_in, with_terms
from rkmate.pipeline.prepare import Measured, Traced, compile_all, held_tensors, on_estimates, trace
from rkmate.pipeline.refuse import room_within
from rkmate.pipeline.search import make_plan
from rkmate.pipeline.sizes import KnownPlan, plan_that_fits
from rkmate.runtime.adapters import Observations
from rkmate.runtime.agreement import (
    Description,
    Ranks,
    description,
    exchanges_in,
    ranks_in,
    ranks_of,
    refusals_told,
    shows_signs,
)
from rkmate.runtime.deferred import Reads
from rkmate.runtime.environment import RerunState
from rkmate.runtime.executable import Gradients, PlannedStep
from rkmate.runtime.guards import Guards, ModuleReader, as_captured
from rkmate.runtime.kept_plans import (
    Executable,
    KeptPlans,
    Planning,
    Prototype,
    Specialization,
    TangentMask,
    handed_on,
)
from rkmate.runtime.new_sizes import Member, NewSizes, compare, derive, known_at, members_for
from rkmate.runtime.outside import (
    LOOKS,
    MANY,
    BetweenMeter,
    InARow,
    Outside,
    OutsideWatch,
    Shown,
    is_over,
    loss_of_call,
    needs_of,
    room_for_loss,
    warn_of_others,
    warn_of_row,
)
from rkmate.runtime.recorded_step import RecordedStep, check_plan
from rkmate.runtime.segments import Call, OpenCalls, saved_by, taken_by
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import gc_pause, planning_lock
from rkmate.support.progress import Progress
from rkmate.support.warn import warn

logger = logging.getLogger("rkmate")

class PlanCache:
    """Makes the plans of one module on demand, and keeps the latest.

    A forward that finds its plan never waits for a thread that plans: what is kept has a lock of its own.
    """

    def __init__(self, reader: ModuleReader, planning: Planning, saved: Sequence[Plan | Prototype]) -> None:
        """`saved`: plans to follow if they fit, instead of searching for one."""
        self.model, self._reader, self.planning = reader.model, reader, planning
        self.observations = Observations()
        self._prototypes = self._looking([s for s in saved if isinstance(s, Prototype)])
        self._saved = [s.planned.plan if isinstance(s, Prototype) else s for s in saved]
        self.kept = KeptPlans(type(self.model).__name__, self.observations)
        self.open_calls = OpenCalls(planning.calls_at_once, counts=planning.counts_calls,
                                    more_calls=planning.more_calls)
        # Parts have a share of a known step.
        self.in_a_row = InARow(self.model, looks=planning.settings.loss_bytes is None)
        self.new_sizes = NewSizes()
        self._confirmed = 0
        """The number of latest looks at what a caller makes of outputs that have all shown enough room."""
        self.reads = Reads()
        self._ranks: Ranks | None = None
        """The ranks that make plans for new signatures together; None: each process plans alone."""
        self._agreed: list[tuple[object, list[str]]] = []
        """Captures of forwards that communicate, and collectives of plans that all ranks have compared."""
        self._engines = planning.engines or Engines(planning.settings.offload)

    def __len__(self) -> int:
        return len(self.kept)

    def recorded(self, ready: Executable, tensors: Sequence[torch.Tensor]) -> RecordedStep | None:
        """Return the recording to replay for a call; None where its step runs as it is: the first one of a
        plan."""
        if not self.planning.settings.run.cuda_graph or not ready.ran:
            return None
        if ready.recorded is None or not ready.recorded.fits(tensors):
            ready.recorded = None           # its memory goes before there is another
            ready.recorded = RecordedStep(ready.compiled, tensors)
        return ready.recorded

    def all(self) -> list[Plan]:
        """Return every plan that is kept."""
        return [e.plan for s in self.kept.all() for e in list(s.executables.values())] or self._saved

    def follow(self, prototypes: Sequence[Prototype]) -> None:
        """Forget all plans, and follow these from now on."""
        self._prototypes = self._looking(prototypes)
        self._saved = [p.planned.plan for p in prototypes]
        self.kept.clear()

    def _looking(self, prototypes: Sequence[Prototype]) -> list[Prototype]:
        """Return prototypes whose keys have the kinds of the arguments that libraries look at."""
        look = self.observations.look
        return [replace(p, key=look(p.key, p.traced.capture.looked), also=tuple(
            look(key, p.traced.capture.looked) for key in p.also)) for p in prototypes]

    def has_prototype(self, key: Guards) -> bool:
        """Return whether a call follows the plan of an equal one that was captured before."""
        return self._prototype(key) is not None

    def _prototype(self, key: Guards) -> Prototype | None:
        return next((p for p in self._prototypes if p.fits(self.model, key)), None)

    def make(self, key: Guards, args: tuple[Any, ...], kwargs: dict[str, Any],
             plan: Plan | None = None) -> Specialization:
        """Plan for a new signature. `plan`: one to follow; `PlanError` when it does not fit."""
        with planning_lock, gc_pause(lasting=True), contextlib.ExitStack() as undo:
            known = self.kept.find(key)
            if known is not None:
                return known
            ranks = ranks_of(plan) or self._ranks
            if ranks is None:
                with shows_signs(alone=True):
                    return self._make(key, args, kwargs, plan, None, undo)
            ranks.agree(self._described(args, kwargs))
            made = ranks.together(lambda: self._make(key, args, kwargs, plan, ranks, undo))
            self._ranks = ranks
            return made

    def _described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Description:
        """Describe what a call plans for. A share of a step's budget is each rank's own."""
        settings, is_share = self.planning.settings, self.planning.more_calls is not None
        return description(self.model, args, kwargs, replace(settings, loss_bytes=None) if is_share
                           else settings, None if is_share else self.planning.budget)

    def _make(self, key: Guards, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None,
              ranks: Ranks | None, undo: contextlib.ExitStack) -> Specialization:
        """Plan for a new signature. `ranks`: those that make one plan for it; None: this process alone.
        `undo`: takes back what a capture leaves in the model, if the caller's context fails."""
        start, others, budget = time.perf_counter(), self.kept.of_other_sizes(key), self.planning.budget
        members = members_for(key, [s.member for s in others])
        like = None if plan is not None else self._prototype(key)
        with refusals_told(lambda: self._described(args, kwargs)):
            if not self.kept.has_flags(key.flags):
                refuse_what_cannot_repeat(self.model, args, kwargs,
                                          hooks_outside=self.planning.hooks_outside)
            self.kept.warn_of_changes(key)
            derived, recording = derive(self.model, args, kwargs, key, members)
            if like is None and derived is None:
                undo.enter_context(as_before(self.model, on_error=True))
            traced = like.traced if like is not None else trace(
                self.model, args, kwargs, self.planning.settings, Progress(self.planning.progress), derived)
        captured = traced.capture
        key = as_captured(key, self._reader, captured)
        if like is None:
            traced = replace(traced, wanted=self.planning.taught_mask(captured) or traced.wanted)
        latest = None if derived is None and (like or plan or ranks or self._saved) else \
            others[-1] if others else self.kept.latest()
        if latest is not None:
            traced = replace(traced, wanted=latest.mask_for(captured) or traced.wanted)
        attempts, before = self._attempts(traced, key, others, like, plan, ranks, latest)
        traced = attempts[0]
        plans = [e.known for s in others for m, e in s.executables.items()
                 if e.known is not None and m == traced.wanted]
        try:
            alone = ranks is not None or self._is_agreed(traced, like)
            together = None if alone else ranks_in(groups_of(captured.graph))
            if together is not None:
                together.agree(self._described(args, kwargs))

            def made(by: Measured | None = None) -> Executable:
                nonlocal traced
                make = self._executable if ranks is None else self._own_executable
                for traced in attempts[:-1]:
                    with contextlib.suppress(InfeasibleBudget):
                        return make(replace(traced, measured_by=by), budget, plan, plans, like,
                                    derived=derived is not None)
                traced = attempts[-1]
                return make(replace(traced, measured_by=by), budget, plan, plans, like,
                            derived=derived is not None)

            executable = made() if ranks is None or plan is not None else \
                self._led(ranks, made, traced, budget)
            self.planning = replace(self.planning, budget=budget.at_least(executable.plan.budget_bytes))
        except InfeasibleBudget as error:
            if self.planning.over is not None and ranks is None:
                executable, refused = self._at_least(traced, error)
                self.planning.over(refused)
            elif not len(self.kept):
                raise
            else:
                shapes = ", ".join(str(tuple(place[0])) for place in key.inputs)
                raise InfeasibleBudget(f"a call with inputs of shape {shapes}: {error}",
                                       error.minimum_bytes) from error
        key = self.observations.add(self.observations.look(key, captured.looked), captured.recipe)
        # What is kept holds no tensors of this call.
        known = Specialization(replace(traced, tensors={}), {traced.wanted: executable}, traced.wanted,
                               sums=frozenset(() if self.planning.is_part else terms_in(traced.capture)),
                               inputs=key.inputs, may_leave_room=self.planning.counts_calls and not (
                                   self._saved or groups_of(captured.graph)))
        known.go_on_from(before)
        if before is None and (others or latest) and not ranks and traced.settings is attempts[0].settings:
            known.go_on_from_sizes(self._confirmed if others else 0, self.new_sizes.count + 2)
        if derived is None and captured.recipe is None and like is None and not groups_of(captured.graph):
            known.member = Member(key, known_at(key, captured, args, kwargs, recording))
            if others and len(members) < 2:     # from now on, there may be as many as others are derived from
                compare(self.model, [*members, known.member])
        if len(self):
            self.new_sizes.add(derived is not None, time.perf_counter() - start)
        self.kept.keep(key, known, others, self.planning.settings.kept_plans_bytes)
        return known

    def _attempts(self, traced: Traced, key: Guards, others: Sequence[Specialization],
                  like: Prototype | None, plan: Plan | None, ranks: Ranks | None,
                  latest: Specialization | None) -> tuple[list[Traced], Specialization | None]:
        """Return what to plan, in the order in which it is tried: with gradients of shared inputs as terms of
        sums, or as sums; with the room for the caller that other sizes, or `latest`, have shown, or with the
        usual room. And the signature that differs in numbers alone."""
        # Ranks that follow one rank's plan leave the usual room for a new size: the plan does not tell which.
        handed, before = handed_on(traced, key.inputs, [
            s for s in others if ranks is None or s.inputs == key.inputs], None if ranks else latest)
        attempts, split = [handed], self.planning.shared_inputs
        may_split = plan is None and ranks is None and not (self._saved or self.planning.is_part)
        if like is None and split:
            attempts = [replace(handed, capture=with_terms(traced.capture, split))]
        elif like is None and may_split and (terms := few_terms(traced.capture)):
            attempts.insert(0, replace(handed, capture=with_terms(traced.capture, terms)))
        if before is None and handed is not traced:
            attempts.append(replace(attempts[-1], outside=traced.outside, settings=traced.settings))
        return attempts, before

    def current(self, known: Specialization, tensors: Sequence[torch.Tensor]) -> Executable:
        """Return the plan that the next forward follows; made for the loss of the latest one."""
        if known.shown is not None:
            shown, known.shown = known.shown, None
            if (together := shown.together()) is not None:
                self._note_outside(known, shown.ready, *together)
        calls = self.planning.settings.calls
        if self.open_calls.seen > calls and not self.open_calls.now():
            return self._for_calls_seen(known, tensors, calls)
        if known.outside != Outside() and known.outside.is_known() and not self.open_calls.now():
            return self._for_outside(known, tensors)
        settled = len(known.executables) < 2 or self.open_calls.now()
        mask = known.mask if settled else known.next_mask()
        found = known.executables.get(mask)
        if found is None:
            with planning_lock:
                found = known.executables.get(mask)
                if found is not None:
                    return found            # another thread made it meanwhile
                held = held_tensors(known.capture, self.model, tensors)
                try:
                    found = self._executable(replace(known.traced, wanted=mask, tensors=held),
                                             self.planning.budget)
                except InfeasibleBudget as error:
                    raise InfeasibleBudget(f"a loss that depends on {known.outputs_in(mask)}: {error}",
                                           error.minimum_bytes) from error
                known.executables[mask] = found
        if found.plan.deferred and self.reads.often:
            found = self._with_ordinary_outputs(known, found, tensors)
        return found

    def _for_calls_seen(self, known: Specialization, tensors: Sequence[torch.Tensor],
                        before: int) -> Executable:
        """Return a plan for the number of calls before a backward that an earlier step made. From now on,
        all plans are for this number. If the budget is too small for it, warn, follow the smallest plan in
        such calls, and plan others for `before` calls."""
        calls = self.open_calls.seen
        with planning_lock:
            taken = max((taken_by(e.plan, calls) for e in known.executables.values()), default=0)
            self._plan_for_calls(calls)
            try:
                found = self.current(known, tensors)
            except InfeasibleBudget as error:
                for_all = known.traced
                self._plan_for_calls(before)
                self.open_calls.warn_from_now_on()
                found = self.current(known, tensors)
                smallest = self._smallest(known, for_all, tensors, error)
                words = f"the module is called {calls} times before a backward, and no plan for {calls} " \
                        f"calls keeps to the budget: {error}. Steps follow"
                if smallest is None or smallest.plan.peak_bytes >= taken_by(found.plan, calls):
                    warn(f"{words} plans for {before}, and exceed the budget")
                    return found
                known.executables[smallest.compiled.wanted] = smallest
                warn(f"{words} the smallest plan, and take about {smallest.plan.peak_bytes:,} bytes")
                return smallest
        logger.warning("the module is called %d times before a backward: from this step on, plans are for %d "
                       "calls, within %s bytes (the first steps, planned for %d, took up to %s; "
                       "calls=%d plans for all from the start)", calls, calls, f"{found.plan.budget_bytes:,}",
                       before, f"{taken:,}", calls)
        return found

    def look_outside(self, call: Call, known: Specialization, ready: Executable) -> None:
        """Look, once for each plan, at what the caller makes of the outputs of a call whose forward has
        returned, before each of its backwards. If the plan has no room for it, the next forward is planned
        anew. If several calls are open, the latest one is looked at, whose backward begins first."""
        self._look_for_finished_calls(call, known, ready)
        if known.has_looked(ready) or self._saved or self.planning.more_calls is not None or \
                self.planning.settings.loss_bytes is not None or \
                len(self.open_calls.now()) < known.traced.settings.calls:
            return
        large, number, device = ready.compiled.outputs.are_large, self.open_calls.added, ready.compiled.device
        measures, ready.looks = known.has_others and large, ready.looks + 1
        meter = BetweenMeter.begun(device, call) if measures else None
        ranks = ranks_in(groups_of(known.capture.graph))
        if measures and meter is None and ranks is None:    # rkmate measures this call: a later one will do
            return
        known.has_others = False
        watch, this, then = OutsideWatch(device, self.model), weakref.ref(call), call.begins
        shown = None if ranks is None else Shown(ready, ranks.told)

        def begins(grads: Sequence[torch.Tensor | None]) -> None:
            mine = this()
            if meter is not None:
                meter.end()
            if mine is not None and self.open_calls.added == number and (large or mine.spent):
                seen = watch.end(grads, mine.copies, mine.env.values_and_sources())._replace(
                    between=None if mine.spent else meter, again=mine.spent)
                opened = len(self.open_calls.now())
                if seen.again and not self.planning.counts_calls:
                    self.in_a_row.tell_once(known.traced.name, seen, ready.plan)
                elif shown is None:
                    self._note_outside(known, ready, seen, opened)
                else:
                    shown.seen = seen, opened
            elif not large:
                self._confirmed += 1
            ready.looks = LOOKS
            if then is not None:
                then(grads)

        call.begins, known.shown = begins, shown

    def _note_outside(self, known: Specialization, ready: Executable, seen: Outside, opened: int) -> None:
        has_room = known.note_outside(ready, seen, opened, self.open_calls)
        if has_room is not None:
            self._confirmed = self._confirmed + 1 if has_room else 0

    def _look_for_finished_calls(self, call: Call, known: Specialization, ready: Executable) -> None:
        """Look, in a step with more calls than its plan is for, for what finished calls leave with the
        caller. If the plan has no room for it, plan the next step anew where calls are counted, or warn."""
        plan = ready.plan

        def tell(seen: Outside) -> None:
            if is_over(seen._replace(held=seen.held - known.traced.outside), plan):
                if known.may_leave_room:
                    known.outside = seen
                else:
                    warn_of_row(known.traced.name, seen, plan)

        self.in_a_row.watch(call, self.open_calls.now, ready.compiled.device, tell)

    def _for_outside(self, known: Specialization, tensors: Sequence[torch.Tensor]) -> Executable:
        """Return a plan that leaves room for what the caller makes of the outputs; where there is none, the
        one before, with a warning."""
        with planning_lock:
            before, executables, seen = known.traced, dict(known.executables), known.outside
            known.outside = Outside()
            if seen == Outside() or not executables:        # plans are for more calls now
                return self.current(known, tensors)         # another thread was here meanwhile
            plans = [e.plan for e in executables.values()]
            usual = max(map(room_for_loss, plans))
            needs = needs_of(seen, usual, before.name)
            if needs is None and seen.operations <= MANY:
                needs = needs_of(seen._replace(between=None), usual, before.name)
            if needs is None:
                warn_of_others(before.name, usual)
                return self.current(known, tensors)
            held, loss = max(needs.held, before.outside), needs.loss
            loss_bytes = max(loss_of_call(loss, p) for p in plans)
            if seen.between is not None:
                known.takes = held, loss_bytes
            if seen.between is not None and all(max(p.calls * saved_by(p) + loss, p.peak_bytes)
                                                <= p.budget_bytes + before.outside - held for p in plans):
                self._confirmed += 1
                return self.current(known, tensors)
            self._confirmed = 0
            given = f"{plans[0].budget_bytes + before.outside:,}"
            takes = max(max(p.peak_bytes + seen.held, p.calls * saved_by(p) + loss) for p in plans)
            if any(e.is_given for e in executables.values()):
                if not known.has_others:
                    needs.tell(f"The plan that you gave is for {given} bytes, and steps take up to about "
                               f"{takes:,} bytes")
                return self.current(known, tensors)
            known.traced = with_room = replace(before, outside=held, settings=replace(
                before.settings, loss_bytes=loss_bytes))
            known.executables.clear()
            try:
                found = self.current(known, tensors)
            except InfeasibleBudget as error:
                known.traced = before
                known.executables.update(executables)
                found = self.current(known, tensors)
                if known.has_others:        # this step measures what it is: the next one says so
                    return found
                smallest = self._smallest(known, with_room, tensors, error)
                if smallest is not None and smallest.plan.peak_bytes + held < takes:
                    known.executables[smallest.compiled.wanted] = smallest
                    needs.tell(f"No plan keeps to the budget with it: {error}. Steps follow the smallest "
                               f"plan, and take about {smallest.plan.peak_bytes + held:,} bytes")
                    return smallest
                needs.tell(f"No plan keeps to the budget with it: {error}. Steps take up to about {takes:,} "
                           f"bytes with plans for {found.plan.budget_bytes:,}, where a usual loss has room")
                return found
        logger.warning("%s: from this step on, plans leave room for that (the steps before took up to %s "
                       "bytes of a budget of %s)", needs.words, f"{takes:,}", given)
        return found

    def _smallest(self, known: Specialization, traced: Traced, tensors: Sequence[torch.Tensor],
                  refused: InfeasibleBudget) -> Executable | None:
        """Return the smallest plan for a loss or a number of calls, for which an error names a budget; None
        if the forward communicates, because ranks may have measured different losses."""
        if groups_of(known.capture.graph):
            return None
        held = held_tensors(known.capture, self.model, tensors)
        try:
            found, _ = self._at_least(replace(traced, wanted=known.mask, tensors=held), refused)
        except InfeasibleBudget:
            return None
        found.looks = LOOKS
        return found

    def _plan_for_calls(self, calls: int) -> None:
        """Let all plans be made again, when they are needed, for a number of calls before a backward."""
        settings = replace(self.planning.settings, calls=calls)
        self.planning = replace(self.planning, settings=settings)
        for each in self.kept.all():
            each.traced = replace(each.traced, settings=replace(each.traced.settings, calls=calls))
            each.executables.clear()

    def _with_ordinary_outputs(self, known: Specialization, found: Executable,
                               tensors: Sequence[torch.Tensor]) -> Executable:
        """Return a plan whose steps compute the outputs that are read all the time; the one before, where
        that takes more than the budget."""
        mask = found.compiled.wanted
        with planning_lock:
            if (latest := known.executables[mask]) is not found or not self.reads.often:
                return latest               # another thread was here meanwhile
            held = held_tensors(known.capture, self.model, tensors)
            traced = replace(known.traced, wanted=mask, tensors=held)
            try:
                made = self._executable(traced.with_deferred("never"), self.planning.budget)
            except InfeasibleBudget as error:
                self.reads.stay(error.minimum_bytes)
                return found
            known.executables[mask] = made
        self.reads.tell(made.plan.peak_bytes)
        return made

    def again(self, known: Specialization, planned: TangentMask, kept: RerunState,
              given: Mapping[int, torch.Tensor]) -> Gradients:
        """Return gradients of a forward that was planned for another loss: it runs a second time.

        The next forward is planned for the gradients that came.
        """
        mask = tuple(i in given for i in range(len(planned)))
        known.take_another_loss(mask, planned)
        with planning_lock, torch.enable_grad():
            found = known.executables.get(mask)
            if found is None:
                found = self._for_one_step(known, mask, kept)
        for made in (found, *known.executables.values()):
            made.compiled.loss_varies = made.compiled.keeps_overwritten = True
        known.warn_of_another_loss(mask, planned, found.plan.peak_bytes)
        with torch.no_grad():
            return found.compiled.again(kept, dict(given))

    def _for_one_step(self, known: Specialization, mask: TangentMask, kept: RerunState) -> Executable:
        traced = replace(known.traced, wanted=mask, tensors={s: kept.sources[source_key(s)].detach()
                         for s in known.capture.sources.values() if s.kind != "tangent"})
        waits = waits_for_backward()
        if waits:                       # the next forward plans with measured costs
            traced = replace(traced, settings=replace(traced.settings, costs="analytic"))
        try:
            found = self._executable(traced, self.planning.budget)
            if not waits:
                known.executables[mask] = found
            return found
        except InfeasibleBudget as error:
            # It is not kept: no forward follows a plan over its budget.
            made, told = self._at_least(traced, error)
            warn(f"{told}; this step takes that much, and another forward for this loss is refused")
            return made

    def _at_least(self, traced: Traced, refused: InfeasibleBudget) -> tuple[Executable, InfeasibleBudget]:
        """Plan at the minimum budget that the error reports. If that minimum was only estimated, planning
        fails once more with the measured one. Returns the plan and the error that it follows."""
        try:
            return self._executable(traced, Budget(bytes=refused.minimum_bytes)), refused
        except InfeasibleBudget as measured:
            return self._executable(traced, Budget(bytes=measured.minimum_bytes)), measured

    def _led(self, ranks: Ranks, make: Callable[[Measured], Executable], traced: Traced,
             budget: Budget) -> Executable:
        """Return what the first rank makes and the others follow, with as much room for a loss."""
        def follow(plan: Plan) -> Executable:
            found = self._own_executable(replace(traced, settings=replace(
                traced.settings, loss_bytes=plan.graph.cd.reserve_at_loss)), budget, plan)
            found.is_given = False                      # all ranks look at what their callers make
            return found
        return ranks.led(make, lambda e: e.plan, follow,
                         lambda said: ranks.measure_too(said, lambda: (traced, room_within(budget))))

    def _executable(self, traced: Traced, budget: Budget, plan: Plan | None = None,
                    known: Sequence[KnownPlan] = (), like: Prototype | None = None, *,
                    derived: bool = False) -> Executable:
        """Return the plan to follow, a saved one, or a new one, and the code of it. `known`: of other sizes;
        `like`: of an equal call; `derived`: from other sizes, and not measured.

        If the forward communicates, the first rank of its process group plans for all, with the costs of the
        slowest one, and the ranks compare the schedules that they will follow. Raises `RankError` on all of
        them if these differ. If they compute different things between the same collectives, each plans alone.
        """
        def make(by: Measured | None = None) -> Executable:
            here = replace(traced, measured_by=by)
            return self._own_executable(here, budget, plan, known, like, derived=derived)

        ranks = ranks_in(groups_of(traced.capture.graph))
        if ranks is None or self._is_agreed(traced, like):
            return make()
        if plan is None and ranks.differ_between(*outlines(traced.capture)):
            logger.warning("ranks compute different things between equal collectives of %s: each has a plan "
                           "of its own", traced.name)
            found = ranks.each(make, lambda e: e.plan)
        else:
            found = ranks.together(make if plan else lambda: self._led(ranks, make, traced, budget))
            ranks.same_schedule(found.plan)
        self._agreed.append((traced.capture, exchanges_in(found.plan)))
        return found

    def _is_agreed(self, traced: Traced, like: Prototype | None) -> bool:
        """Return whether a plan to follow has the collectives of one that the ranks have compared."""
        return like is not None and any(known is traced.capture and found == exchanges_in(
            like.planned.plan) for known, found in self._agreed)

    def _own_executable(self, traced: Traced, budget: Budget, plan: Plan | None = None,
                        known: Sequence[KnownPlan] = (), like: Prototype | None = None, *,
                        derived: bool = False) -> Executable:
        """Return the executable of this process, made by it alone."""
        if plan is None and self.reads.often and traced.settings.deferred_outputs != "never":
            with contextlib.suppress(InfeasibleBudget):
                return self._own_executable(traced.with_deferred("never"), budget, None, known, like,
                                            derived=derived)
        is_given = plan is not None
        saved = [p for p in self._saved if not p.deferred or traced.settings.deferred_outputs != "never"]
        planned = like.planned if like is not None else \
            follow(traced, plan, of_rank=bool(groups_of(traced.capture.graph))) if plan is not None else \
            follow_any(traced, saved) if saved else None
        if planned is None:
            try:
                planned = plan_that_fits(traced, budget, self.planning.planner, known,
                                         measured=not derived) if known else None
                derived = derived and planned is not None
                planned = planned or make_plan(traced, budget, self.planning.planner)
            except MeterError as error:
                derived = True
                planned = make_plan(on_estimates(traced, error), budget, self.planning.planner)
        prepared, plan = planned.prepared, planned.plan
        compile_all(prepared.partition.program.operation, traced.progress)
        generated = emit(prepared.partition, plan.schedule, [b.label for b in prepared.infos],
                         in_one_line(plan), prepared.graph)
        plan = replace(plan, source=generated.text)
        step = PlannedStep(self.model, prepared.capture, prepared.partition, generated, prepared.device,
                           self._engines.of(prepared.device) if generated.copies else None)
        if self.planning.settings.run.cuda_graph:
            check_plan(plan, step)
        return Executable(plan, step, is_given=is_given,
                          known=KnownPlan(plan, not derived, planned.orders),
                          graph_nodes=len(prepared.partition.program.joint.graph.nodes))
