"""How long the default planner looks, and when what it has found is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rkmate.errors import ArgumentError
from rkmate.support.defaults import Default


@dataclass(frozen=True)
class PlannerSettings:
    """Which planner, and how long the default one looks. Times bound what can stop early; nothing else
    depends on a clock."""

    name: str = "rockmate"
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
    """How long the save-set program may look for a schedule of one budget."""
    first_seconds: float = 5.0
    """How long it may look again, for the first budget of a model, where it was cut short and the best
    schedule is more than `wide_gap` above its bound; and for a first budget that the chain cannot meet."""
    gap_tolerance: float = 2e-4
    """How near to its lower bound, relative to it, a schedule is good enough for no other strategy to be
    asked."""
    wide_gap: float = 1e-2
    """How far above its bound a schedule is worth `first_seconds`."""
    smallest_seconds: float = 2.0
    """How long to look for the smallest budget that can be met, once none can."""
    deep_nodes: int = 800
    """On graphs of more computations, a further budget gets one schedule of the chain after few tries, and
    dtr and lower sets are not asked."""
    deep_seconds: float = 0.75
    """How long the chain and the save-set program may take together for such a budget: less for the
    program, where the chain's table is made first."""
    deep_unused: float = 2e-2
    """A schedule of the chain that leaves less than this share of such a budget unused is good enough; so is,
    for the smallest budget of such a graph, what is this near to what cannot be."""
    dtr_nodes: int = 1500
    """Up to how many computations dtr is asked: its time grows with the square."""
    lower_set_nodes: int = 300
    """Up to how many computations lower sets are asked."""
    fine: int = 4
    """A table for small budgets ends at this many times the least memory of the chain, with half as many
    slots: the one for all budgets has a dozen below the least memory of a deep model."""
    offload_seconds: float = 10.0
    """How long copies may be looked for, where data can be sent away, next to what it takes to plan without
    them; once a budget cannot be met, how long for those that take the least memory."""
    partial_save_blocks: int = 40
    """Up to how many blocks the chain's program lets forwards keep something for one another. Its time
    grows with that, and on the deeper models tried (transformers, all) nothing was gained."""
    partial_save_levels: int = 6
    """At how many levels at most."""
    partial_saves: int = 120
    """Levels times blocks, at most: longer chains have fewer levels."""

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
"""What holds where nobody sets anything."""
