"""Budgets that cannot be met: what a budget is in bytes, lower bounds, the smallest budget that can be met,
and refusals before anything is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.errors import ArgumentError, InfeasibleBudget, PlanningTimeout
from rkmate.ir.gradients import least_memory
from rkmate.ir.kernels import seconds_to_save
from rkmate.ir.schedule import Schedule
from rkmate.ir.simulate import LOSS_SCALARS
from rkmate.measure.analytic import (
    Costs,
    analytic_costs,
    least_bytes,
    with_ample_temporaries,
    with_likely_temporaries,
    without_temporaries,
)
from rkmate.pipeline.prepare import AsCheckpointed, Blocked, Prepared, block, estimated, with_operation_costs
from rkmate.pipeline.solve import Solved, lean_problem, solve
from rkmate.pipeline.variants import CHANNELS_LAST, Variant, others
from rkmate.planners.finish import finish
from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner, smallest
from rkmate.planners.save_set import SaveSetProgram, program_of
from rkmate.planners.several_calls import smallest_steps
from rkmate.support.planning_lock import gc_pause

# -- Lower bounds ----------------------------------------------------------------------------------
#
# What no schedule of a variant does better, known before the options of its blocks are solved.


SECONDS = 0.6
"""Seconds that the program of one variant may take."""


def bytes_of_any(prepared: Prepared) -> int:
    """Return bytes that some backward computation needs by itself: nothing fits in less."""
    return _program(prepared).least_bytes


def seconds_of_any(prepared: Prepared, limit: int) -> float:
    """Return a lower bound, in seconds, for all schedules within `limit` bytes that run each backward
    computation once, in order, by the fastest kernels (`rkmate.planners.save_set`)."""
    program = _program(prepared)
    kept = None if limit < program.least_bytes else program.solve(limit, (), time_limit=SECONDS)
    again = 0.0 if kept is None else kept.bound
    return max(0.0, program.seconds + again - seconds_to_save(prepared.graph))


def _program(prepared: Prepared) -> SaveSetProgram:
    return program_of(prepared.searched, prepared.of_graph)


# -- Fractions of what the model takes -------------------------------------------------------------
#
# What ``torch.utils.checkpoint`` in a model's forward means for its plan.


logger = logging.getLogger("rkmate")


def limit_of(prepared: Prepared, budget: Budget) -> int:
    """Return the bytes that a budget leaves a schedule: a fraction is one of the peak that
    ``Settings.fraction_of`` names."""
    return max(0, budget.of(_reference(prepared) + prepared.beside) - prepared.beside)


def _reference(prepared: Prepared) -> int:
    found = _own_checkpointing(prepared)
    return prepared.baseline_peak if found is None else found.peak


def _own_checkpointing(prepared: Prepared) -> AsCheckpointed | None:
    """Return the model's step with its own checkpointing, if fractions refer to its peak."""
    return prepared.as_checkpointed if prepared.settings.fraction_of == "checkpointed" else None


def share_of(prepared: Prepared, least: int) -> str:
    """Return a budget as a share of the peak that fractions refer to, in words."""
    whole = _reference(prepared) + prepared.beside
    with_it = "" if _own_checkpointing(prepared) is None else " with its checkpointing"
    return f"{least / whole:.0%} of its own peak of {whole:,} bytes{with_it}"


def note_of(prepared: Prepared) -> str:
    """Return a plan's note about the checkpointing of the model; empty if there is none."""
    found = prepared.as_checkpointed
    if found is None:
        return ""
    n = found.regions
    return (f"the plan replaces torch.utils.checkpoint in {n} region{'s' if n > 1 else ''}; with "
            f"it, the model's own step would have a peak of {found.peak:,} bytes and take "
            f"{found.seconds / prepared.baseline.seconds - 1:+.0%} time")


def tell(prepared: Prepared, budget: Budget) -> None:
    """Log which peak a fraction refers to, if the model checkpoints itself and nothing was chosen."""
    if budget.fraction is None or prepared.settings.fraction_of == "plain":
        return
    found = prepared.as_checkpointed
    if found is not None:
        logger.warning(
            "the model calls torch.utils.checkpoint, which a plan replaces: a budget of %g is that part of "
            "the peak with the model's own checkpointing (%s bytes). "
            'rkmate.Settings(fraction_of="plain") makes it one of the peak without (%s bytes)',
            budget.fraction, f"{found.peak:,}", f"{prepared.baseline_peak:,}")


# -- Room to measure in ----------------------------------------------------------------------------
#
# The memory that measuring may take: what the step may take that is planned.


def room_within(budget: Budget) -> Callable[[Blocked], int]:
    """Return a function from a graph to the bytes that measuring it may take, within a budget.

    A fraction refers to a peak that is not known before all operations are measured: until then, the
    estimated peak counts, or the largest operation's own bytes if these are more. Every process therefore
    finds the same peak, whatever it remembers from earlier ones.
    """
    def room(blocked: Blocked) -> int:
        if budget.bytes is not None:
            return budget.bytes
        return max(limit_of(estimated(blocked), budget), least_bytes(blocked.partition))
    return room


def wholly_measured(prepared: Prepared, limit: int) -> Prepared:
    """Return a graph with all operations measured, those too that have no room within the limit: for the
    smallest budget that has some. Measuring takes no more than the largest of them then."""
    least = least_bytes(prepared.partition)
    if prepared.settings.costs == "analytic" or least <= limit:
        return prepared
    return with_operation_costs(prepared.blocked, limit=lambda blocked: least)


# -- The smallest budget ---------------------------------------------------------------------------
#
# The smallest budget that is met, to be named where a budget is too small, and how soon that is known.
#
# For a deep graph, the integer programs of its blocks take longer than the answer is worth: what one
# backward computation needs alone is a bound that most budgets that are too small are below, and the chain's
# dynamic program over a few options of each block that need no solver comes within a percent or two of it.


LARGE_ROOM = 0.5
"""The share of a smallest budget above which an error speaks of the room that is left for a loss."""


@dataclass(frozen=True, eq=False)
class Refused:
    """A variant without a schedule within a budget."""

    prepared: Prepared
    """The variant; if it was not measured, with the smallest costs that it can have."""
    limit: int
    """The budget, in bytes."""
    solved: Solved | None = None
    """The solved options, if they were needed for the refusal."""
    timeout: bool = False
    note: str = ""
    least: Candidate | None = None
    """The schedule with the smallest peak, where it is known."""
    measured: bool = True
    """Whether the costs of the variant are known."""

    def named(self, first: Prepared) -> int | None:
        """Return the smallest budget that is met, in bytes, where it is known. `first`: the first variant:
        what is next to its step is subtracted from the budget for all variants."""
        return None if self.least is None else self.least.peak + first.beside


def refused_at_once(prepared: Prepared, method: Planner, limit: int) -> Refused | None:
    """Return the refusal of a budget that is known to be too small without block options; None if that is not
    known."""
    if not is_quick(prepared.blocked, method) or limit >= bytes_of_any(prepared):
        return None
    least = smallest(method, lean_problem(wholly_measured(prepared, limit)), limit)
    return None if least is None or least.peak <= limit else Refused(prepared, limit, least=least)


def lean_schedule(prepared: Prepared, method: Planner, limit: int) -> Outcome | None:
    """Return the schedule whose peak `refused_at_once` names, with what is left of the budget spent; None
    where it needs more."""
    if not is_quick(prepared.blocked, method):
        return None
    problem = lean_problem(prepared)
    least = smallest(method, problem, limit)
    found = method.plan(problem, least.peak) if least is not None and least.peak <= limit else None
    if found is None or found.schedule is None:
        return None
    return with_budget_spent(prepared, found, found.schedule, limit)


def with_budget_spent(prepared: Prepared, outcome: Outcome, schedule: Schedule, limit: int) -> Outcome:
    """Return an outcome whose schedule is this one, with what it leaves of the budget spent."""
    if prepared.settings.calls == 1:
        schedule = finish(prepared.graph, schedule, limit)
    return replace(outcome, schedule=schedule, seconds=prepared.simulate(schedule).seconds, ops=(),
                   bound=None, others=())


def is_quick(blocked: Blocked, method: Planner) -> bool:
    """Return whether a planner's smallest budget is looked for without the options of blocks."""
    settings = blocked.traced.settings
    deep = len(blocked.partition.program.cd.c) > settings.of_planner.deep_nodes
    return deep and isinstance(method, Composed) and settings.calls == 1


def smallest_of(solved: Solved, method: Planner, above: int) -> Candidate | None:
    """Return the schedule with the smallest peak that a planner is known to find, for as many calls as the
    settings say."""
    calls = solved.prepared.settings.calls
    if calls == 1:
        return smallest(method, solved.problem, above)
    return min(smallest_steps(method, solved.problem, calls), key=lambda c: c.peak, default=None)


def _wholly(solved: Solved, limit: int) -> Solved:
    """Solve again with measured costs for the operations that were only estimated because they did not fit
    into the limit."""
    prepared = wholly_measured(solved.prepared, limit)
    return solved if prepared is solved.prepared else solve(prepared)


def _with_least(refused: Refused, method: Planner) -> Refused:
    """Return the refusal with measured costs, and with the schedule of the smallest peak, unless time was
    over."""
    limit, solved = refused.limit, refused.solved
    if not refused.measured:
        blocked = refused.prepared.blocked
        prepared = with_operation_costs(blocked, limit=lambda _: max(limit, least_bytes(blocked.partition)))
        return Refused(prepared, limit, least=smallest(method, lean_problem(prepared), limit))
    if refused.least is not None or solved is None or (refused.timeout and not isinstance(method, Composed)):
        return refused
    return replace(refused, least=smallest_of(_wholly(solved, limit), method, limit))


def _error_of(refused: Refused, method: Planner, first: Prepared) -> Exception:
    """Return the error for a budget for which a planner has no schedule. `first`: the first variant, whose
    step is the model's own."""
    name, limit, least = method.name, refused.limit, refused.named(first)
    if refused.timeout and not isinstance(method, Composed):
        return PlanningTimeout(f"{name} found no schedule within {limit:,} bytes in the time "
                               f"it had; {refused.note or 'give it more, or another planner'}")
    limit += first.beside
    if isinstance(method, Composed):
        assert least is not None
        return InfeasibleBudget(
            f"no schedule fits in {limit:,} bytes; the smallest budget that rockmate always meets is "
            f"{least:,} bytes ({share_of(first, least)}){_wished(refused)}"
            f"{_with_room(refused, least)}", least)
    if least is None:
        return ArgumentError(f"planner is {name!r}, which has no schedule for this model at "
                             f"any budget: {refused.note or 'take another one'}")
    return InfeasibleBudget(
        f"{name} has no schedule within {limit:,} bytes; the smallest budget that it meets "
        f"is {least:,} bytes. {refused.note}".rstrip() + _wished(refused), least)


def _wished(refused: Refused) -> str:
    """Return what an error says about the user's wishes."""
    words = refused.prepared.blocked.wishes.words
    return f", with {', '.join(words[:4])}{', ...' if len(words) > 4 else ''}" if words else ""


def _with_room(refused: Refused, least: int) -> str:
    """Return what an error says about room for a loss outside of the model, where much is left for one.
    `least`: the smallest budget."""
    room = refused.prepared.graph.reserve_at_loss
    if refused.prepared.settings.loss_bytes is not None or room < max(
            LARGE_ROOM * least, 2 * LOSS_SCALARS):
        return ""
    return (f". Of these, {room:,} are left for a loss of all outputs, outside of the model: "
            "rkmate.Settings(trains=...) names the outputs that the loss is computed from, and "
            "Settings(loss_bytes=...) the bytes that it takes")


def error_of_all(refused: Sequence[Refused], method: Planner) -> tuple[Exception, Refused]:
    """Return the error of the variant that names the smallest budget, and the refusal of that variant.
    Variants that cannot name a smaller one are not examined. `refused`: the first variant's refusal, then the
    others'."""
    found: list[Refused] = []
    first = refused[0].prepared
    for one in sorted(refused, key=lambda r: bytes_of_any(r.prepared)):
        named = [n for r in found if (n := r.named(first)) is not None]
        if not named or bytes_of_any(one.prepared) < min(named):
            found.append(_with_least(one, method))
    least = min((r for r in found if r.least is not None), key=lambda r: r.named(first) or 0,
                default=found[0])
    return _error_of(least, method, first), least


# -- Refusals before anything is measured ----------------------------------------------------------
#
# Budgets that are refused before anything is measured.
#
# To measure a large model takes a good part of its step. That a budget is far too small shows without: where
# what one backward computation reads and makes, and the gradients that wait, have no room in any variant of
# the graph, temporary memory would only be added to it.


LONG = 10.0
"""Seconds of a step, counted: of a shorter one all is measured in a few seconds, and the error says what was
measured."""


def refused_as_it_is(blocked: Blocked, method: Planner, limit: int) -> Prepared | None:
    """Return a variant with the least costs that it can have, where it has no schedule within a budget even
    so."""
    if not _is_asked(blocked, method):
        return None
    lean = _leanest(blocked, analytic_costs(blocked.partition))
    return lean if limit < _bound(lean) else None


@gc_pause()
def refuse_unmeasured(blocks: dict[Variant, Blocked], budget: Budget, method: Planner) -> None:
    """Raise `InfeasibleBudget` where every variant of a large graph is refused as it is. `blocks`: the first
    variant; others that were looked at are put there."""
    blocked, *_ = blocks.values()
    traced = blocked.traced
    if not _is_asked(blocked, method) or not devices.of(traced.device).cpu_kernels \
            or traced.settings.compile is True:
        return                  # nothing is counted of what other devices, or compiled groups, take
    counted = analytic_costs(blocked.partition)
    if sum(c.time for c in counted.values()) < LONG:
        return
    refused = [_leanest(blocked, counted)]
    limit = _most(refused[0], counted, budget)
    if limit is None or limit >= _bound(refused[0]):
        return
    for variant in others(traced.settings, blocked.concerned):
        blocks[variant] = block(traced, variant)
        lean = refused_as_it_is(blocks[variant], method, limit)
        if lean is None:
            return
        refused.append(lean)
    raise _error(refused, method, budget)


def _is_asked(blocked: Blocked, method: Planner) -> bool:
    settings = blocked.traced.settings
    return settings.costs == "measured" and settings.offload is None and is_quick(blocked, method)


def _leanest(blocked: Blocked, counted: Costs) -> Prepared:
    return with_operation_costs(blocked, without_temporaries(counted))


def _bound(prepared: Prepared) -> int:
    return least_memory(prepared.graph)


def _most(lean: Prepared, counted: Costs, budget: Budget) -> int | None:
    """Return the most bytes that a budget can be once costs are measured, where that matters; None: nobody
    knows.

    A fraction's whole grows with what operations take. If one takes much that is not counted (a convolution),
    it does so in every variant, and has to fit into the fraction itself: then the whole grows by no more than
    the fraction. Others are in some variants alone, and what these take is bounded.
    """
    if budget.fraction is None:
        return limit_of(lean, budget)
    blocked = lean.blocked
    if budget.fraction >= 1 or any(
            CHANNELS_LAST in v.rows for v in others(lean.settings, blocked.concerned)):
        return None             # another layout has other convolutions
    ample = with_operation_costs(blocked, with_ample_temporaries(blocked.partition, counted))
    return max(limit_of(ample, budget), int(limit_of(lean, budget) / (1 - budget.fraction)) + 1)


def _error(refused: list[Prepared], method: Planner, budget: Budget) -> InfeasibleBudget:
    """Return the error for a budget that was refused before measuring. `refused`: the first variant, then the
    others."""
    whole = _likely(refused[0].blocked)
    limit = limit_of(whole, budget)
    bounds = [_bound(lean) for lean in refused]
    met: list[int] = []
    for bound, lean in sorted(zip(bounds, refused, strict=True), key=lambda pair: pair[0]):
        if not met or bound < min(met):
            likely = whole if lean is refused[0] else _likely(lean.blocked)
            found = smallest(method, lean_problem(likely), limit)
            met += [] if found is None else [found.peak]
    beside = whole.beside
    limit, least, counted = (n + beside for n in (limit, min(bounds), min(met)))
    return InfeasibleBudget(
        f"no schedule fits in {limit:,} bytes: at least {least:,} bytes are read and made at once. Nothing "
        f"was measured to know that; as counted, the smallest budget that {method.name} meets is "
        f"{counted:,} bytes ({share_of(whole, counted)})", counted)


def _likely(blocked: Blocked) -> Prepared:
    counted = analytic_costs(blocked.partition)
    return with_operation_costs(blocked, with_likely_temporaries(blocked.partition, counted))
