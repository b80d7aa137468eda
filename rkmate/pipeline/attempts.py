"""What a planner makes of one budget, on one variant of the graph."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rkmate.ir.kernels import seconds_to_save
from rkmate.ir.plan import Run
from rkmate.pipeline import deferred_outputs, offload
from rkmate.pipeline.chains import Solved
from rkmate.pipeline.checkpointed import note_of
from rkmate.pipeline.compiled import compiled_by, fused_in
from rkmate.pipeline.prepare import Prepared
from rkmate.pipeline.runs import runs_of, runs_of_operations
from rkmate.pipeline.smallest import lean_schedule
from rkmate.pipeline.summarise import summarise
from rkmate.planners.protocol import Candidate, Composed, Outcome, Planner, ask, found_in
from rkmate.planners.several_calls import ask_for_calls
from rkmate.show.plan import Plan
from rkmate.support.gc_pause import gc_pause

Orders = tuple[tuple[tuple[int, ...], ...], ...]
"""Per class of blocks, the backward orders of its options."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the variant of the graph that it runs over, for code to be generated."""

    plan: Plan
    prepared: Prepared
    orders: Orders = ()
    """Of the options that were solved for it; empty where none were."""
    said: str = ""
    """What the planner says of its schedule: the first part of the plan's note."""


@dataclass(frozen=True)
class Attempt:
    """What one planner made of one budget."""

    plan: Plan | None
    """None unless the status is ok."""
    status: Literal["ok", "infeasible", "timeout"]
    note: str
    found: tuple[Candidate, ...] = ()
    """Schedules for other budgets to know."""


def fits(prepared: Prepared, method: Planner, limit: int) -> bool:
    """Whether a planner runs the whole step within a budget, whatever the options of blocks are."""
    return isinstance(method, Composed) and prepared.baseline_peak <= limit


@gc_pause()
def attempted(prepared: Prepared, solved: Solved | None, method: Planner, limit: int, *,
              time_limit: float | None = None, known: Sequence[Candidate] | None = None) -> Attempt:
    """What a planner finds within `limit` bytes; that it finds nothing is a result, too.

    `solved`: may be None where the planner is a composed one and the whole step fits. `time_limit`:
    seconds of planning, the settings' unless given. `known`: schedules found for other budgets; None at
    the first one.
    """
    if fits(prepared, method, limit):
        each_once = sum(c.time for c in prepared.graph.c)
        outcome = Outcome(prepared.whole, "ok", prepared.baseline.seconds, bound=each_once,
                          note="nothing needs to be recomputed")
        return Attempt(plan_of(prepared, None, method.name, limit, outcome), "ok", outcome.note)
    assert solved is not None
    start = time.perf_counter()
    seconds, calls = prepared.settings.planning_seconds if time_limit is None else time_limit, \
        prepared.settings.calls
    if calls == 1:
        outcome = ask(method, solved.problem, limit, known=known, time_limit=seconds)
        found = found_in(solved.problem, outcome)
    else:
        outcome = ask_for_calls(method, solved.problem, calls, limit, known=known, time_limit=seconds)
        found = outcome.others
    if outcome.schedule is None:
        outcome = lean_schedule(prepared, method, limit) or outcome
    if outcome.schedule is None:
        status: Literal["infeasible", "timeout"] = "timeout" if outcome.status == "timeout" else "infeasible"
        return Attempt(None, status, outcome.note, found)
    searched = replace(solved, stage_seconds={**solved.stage_seconds,
                                              "search": time.perf_counter() - start})
    return Attempt(plan_of(prepared, searched, method.name, limit, outcome), "ok", outcome.note, found)


def plan_of(prepared: Prepared, solved: Solved | None, name: str, limit: int, outcome: Outcome) -> Plan:
    """The plan of an outcome that has a schedule, with the fastest kernels that there is room for.
    `solved`: None where no options were solved for it."""
    assert outcome.schedule is not None
    blocked, parts = prepared.blocked, prepared.partition
    whole = prepared.baseline
    calls = prepared.settings.calls
    schedule = prepared.with_kernels(outcome.schedule, limit if calls == 1 else 0)
    if prepared.peak(schedule, calls) > limit:
        schedule = outcome.schedule             # they leave the peak of one call alone as it is
    result = prepared.simulate(schedule)
    # Of schedules whose computations all run by their own kernels, as planners see them.
    bound = None if outcome.bound is None else max(0.0, outcome.bound - seconds_to_save(prepared.graph))
    if bound is not None and math.isclose(bound, result.seconds):
        bound = min(bound, result.seconds)      # the same numbers, added up in another order
    runs: Sequence[Run]
    if solved is None or not outcome.ops or any(op.save_index is not None for op in outcome.ops):
        runs = tuple(runs_of(outcome.schedule, prepared.graph, parts.block_of))
    else:
        runs = tuple(runs_of_operations(outcome.ops, solved.options))
    return Plan(
        planner=name, budget_bytes=limit, peak_bytes=prepared.peak(schedule, calls),
        baseline_peak_bytes=prepared.baseline_peak,
        step_seconds=result.seconds, baseline_seconds=whole.seconds, bound_seconds=bound,
        minimum_bytes=outcome.smallest, blocks=prepared.infos if solved is None else solved.infos,
        runs=runs, schedule=schedule, fingerprint=blocked.fingerprint,
        costs=tuple(prepared.costs[i] for i in range(len(prepared.graph.c))),
        graph=solved.summary if solved else summarise(prepared),
        note=whole_note(prepared, outcome.note), variant=blocked.variant.name, calls=calls,
        deferred=deferred_outputs.names_of(blocked),
        gradients=prepared.settings.gradients, compiled=compiled_by(prepared.settings),
        fused=fused_in(parts.program.operation),
        stage_seconds=dict((solved or prepared).stage_seconds), nodes=dict(blocked.nodes),
        origin=blocked.traced.origin)


def whole_note(prepared: Prepared, note: str) -> str:
    """A plan's note: what the planner says, and what there is to say of its graph."""
    blocked = prepared.blocked
    variant = blocked.variant.notes(blocked.concerned)
    return "; ".join(part for part in (note, variant, deferred_outputs.note_of(blocked), note_of(prepared),
                                      offload.note_of(prepared.graph.link, prepared.settings.costs))
                     if part)
