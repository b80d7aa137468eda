"""Settings of the default planner: how long it searches, and when a schedule is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rkmate.errors import ArgumentError
from rkmate.support.defaults import DEFAULT_PLANNER, Default


@dataclass(frozen=True)
class PlannerSettings:
    """Planner to use, and limits of the default planner's search. Seconds of the save-set program are those
    of an ordinary processor, counted by the work that is done: a slow or busy machine takes longer, and finds
    the same. The clock ends a program after ten times as long, and at `Settings.planning_seconds`."""

    name: str = DEFAULT_PLANNER
    """``"rockmate"``, the default, takes the fastest schedule of several methods. The methods by themselves,
    to compare them, are ``"rk-rotor"``, ``"rotor"``, ``"revolve"`` (dynamic programs over a chain of blocks),
    ``"sequential"`` (equal segments), ``"chen"`` (square-root segments), ``"checkmate"``, ``"checkmate-lp"``
    (an integer program over every operation, and its rounded relaxation), ``"lower-sets"``,
    ``"lower-sets-memory"``, ``"lower-sets-exact"``, ``"lower-sets-exact-memory"``,
    ``"lower-sets-no-liveness"``, ``"dtr"`` (a replayed run-time policy), ``"save-set"`` (an integer program
    of what is saved at a few times), ``"save-all"`` and ``"recompute-all"``. ``"auto"`` asks most of these
    for half a minute, and says which was best. The fields below are the default planner's."""
    slots: int = 500
    """Memory slots of the chain's dynamic program."""
    save_set_seconds: float = 0.6
    """Seconds that the save-set program may search for a schedule of one budget."""
    first_seconds: float = 2.0
    """Seconds that the save-set program may search in all, for the first budget of a model, if it was cut
    short and the best schedule is more than `wide_gap` above its bound, until it is no more than that; and
    for a first budget that the chain cannot meet."""
    gap_tolerance: float = 2e-4
    """Relative distance to the lower bound at which a schedule is good enough, so that no other strategy is
    asked."""
    chain_gap: float = 5e-3
    """Relative distance to the lower bound above which the chain's dynamic program is asked: nearer to it,
    that finds next to nothing faster than the program on the whole graph."""
    wide_gap: float = 1e-2
    """Relative distance to the lower bound above which a schedule is worth `first_seconds`."""
    smallest_seconds: float = 2.0
    """Seconds to search for the smallest feasible budget, after a budget was infeasible."""
    deep_nodes: int = 800
    """Number of computations above which a graph is deep: a further budget then gets one schedule of the
    chain after few tries."""
    deep_seconds: float = 0.6
    """Seconds that the save-set program may search for a schedule of a further budget, on a graph of more
    than `deep_nodes` computations."""
    deep_unused: float = 2e-2
    """Fraction of a budget: on a graph of more than `deep_nodes` computations, a schedule of the chain that
    leaves less of the budget unused is good enough, and so is a smallest budget that is nearer to an
    infeasible one."""
    fine: int = 4
    """Multiple of the chain's least memory at which a second table, for small budgets, ends, with half as
    many slots. (The table for all budgets has only a dozen slots below the least memory of a deep model.)"""
    offload_seconds: float = 10.0
    """Seconds to search for copies, if data can be sent away, in addition to planning without copies; for an
    infeasible budget, seconds to search for the copies that need the least memory."""

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) \
                    or not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{field.name} is {value!r}; it should be a "
                                    f"{'whole ' if whole else ''}number, finite and not negative")
        if self.slots < 1 or self.fine < 1:
            raise ArgumentError(f"slots and fine are {self.slots} and {self.fine}; they should be at least 1")


DEFAULT = Default(PlannerSettings())
"""Settings that hold unless a user sets others."""
