"""Plans that were made before, on the variant of the graph that each belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from rkmate import device as devices
from rkmate.errors import PlanError, ScheduleError
from rkmate.pipeline import deferred_outputs
from rkmate.pipeline.attempts import Planned
from rkmate.pipeline.prepare import Blocked, Prepared, Traced, block, check_version, with_operation_costs
from rkmate.pipeline.variants import Variant, first, named, possible
from rkmate.show.plan import Plan


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
        blocked = block(deferred_outputs.as_planned(traced, [plan])[0], variant)
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
                    "flags or trained outputs (Settings(trains=...)): make a plan for this one")


def follow_any(traced: Traced, plans: Sequence[Plan]) -> Planned | None:
    """Return the first of some plans that belongs to a captured model; None where none does."""
    for variant, as_then in itertools.product(_variants_of(traced, plans),
                                              deferred_outputs.as_planned(traced, plans)):
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


def _followed(blocked: Blocked, plans: Sequence[Plan]) -> Planned | None:
    for plan in plans:
        if plan.fingerprint == blocked.fingerprint:
            here = _sent_here(plan, blocked.traced)
            prepared = with_operation_costs(blocked, here.costs, link=here.graph.link)
            _check(here, prepared)
            check_version(here.compiled)
            return Planned(here, prepared)
    return None


def _is_alike(blocked: Blocked, plan: Plan) -> bool:
    """Return whether a graph has the computations and the bytes of a plan's graph."""
    mine, planned = blocked.partition.program.cd, plan.graph.cd
    return mine.wiring == planned.wiring and [d.size for d in mine.d] == [d.size for d in planned.d]


def _sent_here(plan: Plan, traced: Traced) -> Plan:
    """Return a plan with the place that this call names for what it sends away. Raises `PlanError` where it
    names none."""
    offload, link = traced.settings.offload, plan.graph.link
    if not plan.schedule.copied or link is None:
        return plan
    if offload is None:
        where = link.place or "another place"
        raise PlanError(f"the plan sends data away while it computes (it was made for {where}), and this "
                        "call does not say where to: say offload= again, or make another plan")
    link = replace(link, place=offload.place, most_bytes=offload.part(1, plan.calls).most_bytes,
                   buffer_bytes=offload.buffer_bytes(devices.of(traced.device)))
    return replace(plan, graph=replace(plan.graph, link=link))


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
