"""The smallest budget that is met, to be named where a budget is too small, and how soon that is known.

For a deep graph, the integer programs of its blocks take longer than the answer is worth: what one backward
computation needs alone is a bound that most budgets that are too small are below, and the chain's dynamic
program over a few options of each block that need no solver comes within a percent or two of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rkmate.errors import ArgumentError, InfeasibleBudget, PlanningTimeout
from rkmate.ilp.grid import lean_options
from rkmate.measure.least import least_bytes
from rkmate.pipeline.bounds import bytes_of_any
from rkmate.pipeline.chains import Solved, solve, solve_with
from rkmate.pipeline.prepare import Blocked, Prepared, with_operation_costs
from rkmate.pipeline.room import wholly_measured
from rkmate.planners.finish import finish
from rkmate.planners.protocol import Composed, Outcome, Planner, Problem, smallest_budget
from rkmate.planners.several_calls import smallest_steps


@dataclass(frozen=True, eq=False)
class Refused:
    """A variant without a schedule within a budget."""

    prepared: Prepared
    """Where nothing was measured, with the least costs that it can have."""
    limit: int
    """The budget, in bytes."""
    solved: Solved | None = None
    """Where its options were solved to know."""
    timeout: bool = False
    note: str = ""
    least: int | None = None
    """The smallest budget that is met, where it is known."""
    measured: bool = True
    """Whether its costs are known."""


def lean_problem(prepared: Prepared) -> Problem:
    """The planner's problem with the options of each block that no program is solved for."""
    return solve_with(prepared, [lean_options(graph) for graph in prepared.class_graphs])


def refused_at_once(prepared: Prepared, method: Planner, limit: int) -> Refused | None:
    """That a budget is too small, where it is known without the options of blocks; None where it is not."""
    if not is_quick(prepared.blocked, method) or limit >= bytes_of_any(prepared):
        return None
    least = smallest_budget(method, lean_problem(wholly_measured(prepared, limit)), limit)
    return None if least is None or least <= limit else Refused(prepared, limit, least=least)


def lean_schedule(prepared: Prepared, method: Planner, limit: int) -> Outcome | None:
    """The schedule whose peak `refused_at_once` names, with what is left of the budget spent; None where it
    needs more."""
    if not is_quick(prepared.blocked, method):
        return None
    problem = lean_problem(prepared)
    least = smallest_budget(method, problem, limit)
    found = method.plan(problem, least) if least is not None and least <= limit else None
    if found is None or found.schedule is None:
        return None
    schedule = finish(prepared.graph, found.schedule, limit, pinned=prepared.pinned,
                      reserve_at_loss=prepared.reserve_at_loss)
    return replace(found, schedule=schedule, seconds=prepared.simulate(schedule).seconds, ops=(), bound=None,
                   others=())


def is_quick(blocked: Blocked, method: Planner) -> bool:
    """Whether a planner's smallest budget is looked for without the options of blocks."""
    settings = blocked.traced.settings
    deep = len(blocked.partition.program.cd.c) > settings.of_planner.deep_nodes
    return deep and isinstance(method, Composed) and settings.calls == 1


def smallest_of(solved: Solved, method: Planner, above: int) -> int | None:
    """The smallest budget that a planner is known to meet, for as many calls as the settings say."""
    calls = solved.prepared.settings.calls
    if calls == 1:
        return smallest_budget(method, solved.problem, above)
    return min((c.peak for c in smallest_steps(method, solved.problem, calls)), default=None)


def _wholly(solved: Solved, limit: int) -> Solved:
    """The same with nothing counted that has no room to be measured."""
    prepared = wholly_measured(solved.prepared, limit)
    return solved if prepared is solved.prepared else solve(prepared)


def _measured(refused: Refused, method: Planner) -> Refused:
    """The same with costs, and so with the smallest budget that is met."""
    if refused.measured:
        return refused
    blocked, limit = refused.prepared.blocked, refused.limit
    prepared = with_operation_costs(blocked, limit=lambda _: max(limit, least_bytes(blocked.partition)))
    return Refused(prepared, limit, least=smallest_budget(method, lean_problem(prepared), limit))


def error_of(refused: Refused, method: Planner, whole: int) -> Exception:
    """What a user hears where a planner has no schedule. `whole`: the peak of the model's own step."""
    name, limit, solved = method.name, refused.limit, refused.solved
    if refused.timeout and not isinstance(method, Composed):
        return PlanningTimeout(f"{name} found no schedule within {limit:,} bytes in the time "
                               f"it had; {refused.note or 'give it more, or another planner'}")
    least = refused.least
    if least is None and solved is not None:
        least = smallest_of(_wholly(solved, limit), method, limit)
    beside = refused.prepared.beside
    limit, whole, least = limit + beside, whole + beside, None if least is None else least + beside
    if isinstance(method, Composed):
        assert least is not None
        return InfeasibleBudget(
            f"no schedule fits in {limit:,} bytes; the smallest budget that rockmate always meets is "
            f"{least:,} bytes ({least / whole:.0%} of its own peak of {whole:,} bytes)", least)
    if least is None:
        return ArgumentError(f"planner is {name!r}, which has no schedule for this model at "
                             f"any budget: {refused.note or 'take another one'}")
    return InfeasibleBudget(
        f"{name} has no schedule within {limit:,} bytes; the smallest budget that it meets "
        f"is {least:,} bytes. {refused.note}".rstrip(), least)


def error_of_all(refused: list[Refused], method: Planner) -> Exception:
    """The error of the variant that comes furthest down. Those that cannot are not looked at closely.
    `refused`: of the first variant, then of the others."""
    whole = refused[0].prepared.baseline_peak
    found: list[Exception] = []
    for one in sorted(refused, key=lambda r: bytes_of_any(r.prepared)):
        named = [e.minimum_bytes for e in found if isinstance(e, InfeasibleBudget)]
        if not named or bytes_of_any(one.prepared) < min(named):
            found.append(error_of(_measured(one, method), method, whole))
    met = [e for e in found if isinstance(e, InfeasibleBudget)]
    return min(met, key=lambda e: e.minimum_bytes) if met else found[0]
