"""Plans that were made before, on the variant of the graph that each belongs to: saved plans that a user
gives, and plans that an earlier process has left on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from rkmate import device as devices
from rkmate.device.inductor import version as compiler_version
from rkmate.errors import PlanError, ScheduleError
from rkmate.ir.plan import PlanData, read_fields, read_step, step_content, written_fields
from rkmate.ir.schedule import Schedule
from rkmate.pipeline.attempts import Planned, plan_of
from rkmate.pipeline.prepare import (
    Blocked,
    Prepared,
    Traced,
    block,
    compiled_by,
    prepare,
    with_operation_costs,
)
from rkmate.pipeline.refuse import Refused, with_budget_spent
from rkmate.pipeline.settings import RunSettings
from rkmate.pipeline.variants import Variant, first, named, possible
from rkmate.planners.protocol import Candidate, Outcome
from rkmate.show.plan import Plan
from rkmate.support.cache import cache_folder, read_json, store_json
from rkmate.support.version import source_state
from rkmate.support.warn import warn

# -- Plans that are given ---------------------------------------------------------------------------


def follow(traced: Traced, plan: Plan, *, of_rank: bool = False) -> Planned:
    """Return a plan that was made before, on the variant of the graph that it belongs to. Raises `PlanError`
    where it does not belong to this model, to this way of gradients, or to as many calls.

    of_rank: whether another rank made it for the same step. Graphs of ranks may differ in constants (the
    number of a rank's first row), but not in computations and bytes.
    """
    if plan.gradients != traced.settings.gradients:
        raise PlanError(f'the plan was made with gradients="{plan.gradients}", and this call says '
                        f'"{traced.settings.gradients}": say gradients="{plan.gradients}", or make another '
                        "plan")
    if plan.calls < traced.settings.calls:
        raise PlanError(f"the plan was made with calls={plan.calls}, and this call says "
                        f"calls={traced.settings.calls}: make another plan")
    if bool(plan.compiled) != (traced.settings.compile is True):
        raise PlanError(f"the plan was made with compile={bool(plan.compiled)}, and this call says "
                        f"{traced.settings.compile}: say compile={bool(plan.compiled)}, or make another plan")
    for variant in dict.fromkeys([*_variants_of(traced, [plan]), *possible(traced.settings)]):
        blocked = block(_as_planned(traced, [plan])[0], variant)
        if of_rank and _is_alike(blocked, plan):
            plan = replace(plan, fingerprint=blocked.fingerprint)
        found = _followed(blocked, [plan])
        if found is not None:
            return found
    made_for, here = "" if plan.origin is None else plan.origin.device, traced.origin.device
    if made_for and made_for.split(":")[0] != here.split(":")[0]:
        raise PlanError(f"the plan was made for {made_for}, and this is {here}, where this model has another "
                        "graph: make a plan here")
    raise PlanError("the plan belongs to another model, or to other input shapes, dtypes, train "
                    "flags or trained outputs (Settings(trains=...)): make a plan for this one" + (
                        _OF_RANK if of_rank else ""))


_OF_RANK = (". If it is the plan of another rank, the forward may branch on its rank, or exchange another "
            "number of rows there: plan the parts between its collectives instead, each with "
            "rkmate.apply(part, budget=...)")


def _check_version(plan_compiled: str) -> None:
    """Warn if a plan's kernels were compiled by another compiler than the current one."""
    if plan_compiled and plan_compiled != compiler_version():
        warn(f"the plan was compiled by {plan_compiled}, and its kernels are compiled anew by "
             f"{compiler_version()}: they may take other time and temporary memory than the plan says. Make "
             "it again to be sure of its peak")


def follow_any(traced: Traced, plans: Sequence[Plan]) -> Planned | None:
    """Return the first of some plans that belongs to a captured model; None where none does."""
    for variant, as_then in itertools.product(_variants_of(traced, plans), _as_planned(traced, plans)):
        try:
            found = _followed(block(as_then, variant), plans)
        except PlanError:
            continue
        if found is not None:
            return found
    return None


def _variants_of(traced: Traced, plans: Sequence[Plan]) -> list[Variant]:
    """Return the variants that plans name; and the settings' first, for plans that name none."""
    return list(dict.fromkeys([*(named(plan.variant) for plan in plans), first(traced.settings)]))


def _as_planned(traced: Traced, plans: Sequence[Plan]) -> list[Traced]:
    """Return a captured model with its outputs deferred, or not, as plans have them."""
    wanted: dict[Literal["auto", "never"], None] = dict.fromkeys(
        "auto" if plan.deferred else "never" for plan in plans)
    return [traced if traced.settings.deferred_outputs == w else traced.with_deferred(w) for w in wanted]


def _followed(blocked: Blocked, plans: Sequence[Plan]) -> Planned | None:
    for plan in plans:
        if plan.fingerprint == blocked.fingerprint:
            here = _sent_here(plan, blocked.traced)
            prepared = with_operation_costs(blocked, here.costs, link=here.graph.cd.link)
            _check(here, prepared)
            _check_version(here.compiled)
            return Planned(here, prepared)
    return None


def _is_alike(blocked: Blocked, plan: Plan) -> bool:
    """Return whether a graph has the computations and the bytes of a plan's graph."""
    mine, planned = blocked.partition.program.cd, plan.graph.cd
    return mine.wiring == planned.wiring and [d.size for d in mine.d] == [d.size for d in planned.d]


def _sent_here(plan: Plan, traced: Traced) -> Plan:
    """Return a plan with the place that this call names for what it sends away. Raises `PlanError` where it
    names none."""
    offload, link = traced.settings.offload, plan.graph.cd.link
    if not plan.schedule.copied or link is None:
        return plan
    if offload is None:
        where = link.place or "another place"
        raise PlanError(f"the plan sends data away while it computes (it was made for {where}), and this "
                        "call does not say where to: say offload= again, or make another plan")
    link = replace(link, place=offload.place, most_bytes=offload.part(1, plan.calls).most_bytes,
                   buffer_bytes=offload.buffer_bytes(devices.of(traced.device)))
    return replace(plan, graph=plan.graph.with_link(link))


def _check(plan: Plan, prepared: Prepared) -> None:
    try:
        peak = prepared.peak(plan.schedule, plan.calls)
    except (ScheduleError, IndexError, KeyError) as error:
        raise PlanError(f"the plan's schedule does not run on this model: {error}") from error
    if peak != plan.peak_bytes:
        raise PlanError(f"the plan says that its peak is {plan.peak_bytes:,} bytes, the simulator "
                        f"says {peak:,}: make the plan again")
    link = prepared.graph.link
    if plan.schedule.copied and link is not None and link.most_bytes is not None:
        away = prepared.simulate(plan.schedule).away
        if away > link.most_bytes:
            each = "" if plan.calls == 1 else f" in each of {plan.calls} calls"
            offload = prepared.settings.offload
            assert offload is not None, "which _sent_here has seen to"
            raise PlanError(f"the plan sends {away:,} bytes away{each}, and most_bytes is "
                            f"{offload.most_bytes:,}: give more, or make another plan")


# -- Plans on disk ---------------------------------------------------------------------------------
#
# Plans that were searched for: another process on the same model and machine need not search.
#
# An entry is one JSON file in the cache folder: the variant of the graph, its schedule, and what the search
# said of it. Its name is a hash of everything that the search depends on: the graph of the first variant with
# its costs, the budget, the planner, the settings and the versions. The rest of the plan is made from the
# captured model. The simulator judges the schedule again. If an entry's peak or time is not the simulator's,
# the entry is not used: an old, broken or edited file costs a search, and never gives a wrong plan.


FORMAT = 1
"""Grows when the content of an entry changes its meaning."""
_FIELDS = ("variant", "fingerprint", "schedule", "runs", "blocks", "peak_bytes", "step_seconds",
           "bound_seconds", "minimum_bytes", "note", "baseline_peak_bytes", "baseline_seconds",
           "first_seconds")
"""Fields of a plan that an entry has."""
Reason = tuple[str, str]
"""Why a variant was taken, and what the settings that forbid it would do: the parts of a warning."""


def place_of(prepared: Prepared, limit: int | None, planner: str) -> Path | None:
    """Return the file of what was found for a budget of `limit` bytes; None if plans like this one are not
    remembered: where data goes is measured anew in each process.

    `prepared`: the first variant. Without a limit: the file of the smallest budget that was named, which
    serves whatever operations cost: costs depend on the limit, too.
    """
    settings, link = prepared.settings, prepared.graph.link
    if settings.offload is not None or link is not None:
        return None
    device = devices.of(prepared.device)
    content = [
        FORMAT, source_state(), str(torch.__version__), compiled_by(settings),
        device.key() if device.elsewhere is None else device.elsewhere.name, prepared.blocked.fingerprint,
        prepared.blocked.traced.wanted, prepared.blocked.variant.name,
        [] if limit is None else [prepared.costs[i].row() for i in range(len(prepared.graph.c))],
        prepared.graph.held, prepared.graph.reserve_at_loss, limit, planner, repr(settings.of_planner),
        repr(replace(settings, run=RunSettings()))]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return cache_folder() / "plans" / f"{name}.json"


_BROKEN = ValueError, KeyError, TypeError, IndexError, ScheduleError
"""Errors of an entry that is broken, or was edited: it will be replaced."""


def recall(place: Path, prepared: Prepared, limit: int, planner: str,
           blocks: Mapping[Variant, Blocked]) -> tuple[Planned, Reason] | None:
    """Return what was found before, on the variant of the graph that it belongs to; None where nothing was.
    `blocks`: variants that were cut into blocks before."""
    entry = read_json(place)
    if entry is None:
        return None
    start, traced = time.perf_counter(), prepared.blocked.traced
    try:
        found = read_fields(PlanData, entry, _FIELDS)
        variant, schedule = named(found["variant"]), found["schedule"]
    except _BROKEN:
        return None
    here = prepared if variant == prepared.blocked.variant else prepare(
        traced, blocked=blocks.get(variant) or block(traced, variant), limit=lambda blocked: limit)
    try:
        if here.blocked.fingerprint != found["fingerprint"]:
            return None
        peak, result = here.peak(schedule, here.settings.calls), here.simulate(schedule)
        if peak != found["peak_bytes"] or peak > limit \
                or not math.isclose(result.seconds, found["step_seconds"], rel_tol=1e-9):
            return None
        plan = plan_of(here, None, planner, limit, Outcome(schedule, "ok", result.seconds))
        plan = replace(plan, **found)
        orders = tuple(tuple(tuple(map(int, order)) for order in options) for options in entry["orders"])
        why, instead = map(str, entry["reason"])
    except _BROKEN:
        return None
    plan = replace(plan, stage_seconds={**plan.stage_seconds, "found on disk": time.perf_counter() - start})
    return Planned(plan, here, orders, str(entry["said"])), (why, instead)


def remember(place: Path, planned: Planned, reason: Reason) -> None:
    """Write what a search has found."""
    plan: Plan = planned.plan
    entry = {**written_fields(plan, _FIELDS), "orders": planned.orders, "said": planned.said,
             "reason": reason}
    store_json(place, entry, is_small=False)


def recall_named(place: Path, refused: Sequence[Refused]) -> Refused | None:
    """Return a refusal with the schedule whose peak an earlier refusal named; None where nothing was named,
    or where that schedule takes more now. `refused`: the variants' refusals."""
    entry = read_json(place)
    if entry is None:
        return None
    try:
        found = next(r for r in refused if r.prepared.blocked.fingerprint == entry["fingerprint"])
        schedule, here = Schedule(tuple(map(read_step, entry["steps"]))), found.prepared
        named, peak = int(entry["peak_bytes"]), here.peak(schedule, here.settings.calls)
        seconds = here.simulate(schedule).seconds
        if peak > found.limit >= named:
            return None
        if peak > found.limit:              # operations that take more than the limit may not be measured
            peak = max(peak, named)
        return replace(found, least=Candidate(schedule, peak, seconds, str(entry["note"])), measured=True)
    except (StopIteration, *_BROKEN):       # or of a variant that is not there
        return None


def remember_named(place: Path, refused: Refused) -> None:
    """Write the schedule whose peak a refusal names."""
    if refused.least is not None:
        store_json(place, {"fingerprint": refused.prepared.blocked.fingerprint, "note": refused.least.note,
                           "peak_bytes": refused.least.peak,
                           "steps": [step_content(s) for s in refused.least.schedule.steps]}, is_small=False)


def planned_as_named(refused: Refused, planner: str) -> Planned:
    """Return the plan of the schedule that a refusal names, with what it leaves of the budget spent."""
    prepared, limit, least = refused.prepared, refused.limit, refused.least
    assert least is not None
    outcome = with_budget_spent(
        prepared, Outcome(None, "ok", least.seconds, note=least.note, smallest=least.peak),
        least.schedule, limit)
    return Planned(plan_of(prepared, None, planner, limit, outcome), prepared, said=least.note)
