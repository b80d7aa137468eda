"""All planners by name. The order is the order in which tables list them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rkmate.errors import ArgumentError
from rkmate.planners.chain import RECOMPUTE_ALL, SAVE_ALL, SEQUENTIAL, ChainProgram
from rkmate.planners.checkmate import CheckmatePlanner, CheckmateRounded
from rkmate.planners.default import Auto, Default
from rkmate.planners.dtr_offline import DtrOffline
from rkmate.planners.lower_sets import CHEN, LowerSetPlanner
from rkmate.planners.protocol import Composed, Planner
from rkmate.planners.save_set import SaveSet
from rkmate.planners.settings import PlannerSettings
from rkmate.support.defaults import DEFAULT_PLANNER
from rkmate.support.warn import warn

_DEFAULT, _CHAIN, _DTR, _LOWER_SETS = Default(), ChainProgram("rk-rotor"), DtrOffline(), LowerSetPlanner(
    "lower-sets")
_SINGLE: tuple[Planner, ...] = (
    _DEFAULT,
    _CHAIN,
    ChainProgram("rotor", whole_options=True),
    ChainProgram("revolve", whole_options=True, keep=False),
    SEQUENTIAL,
    CHEN,
    CheckmatePlanner(starts=(_CHAIN, _DTR, _LOWER_SETS)),
    CheckmateRounded(),
    _LOWER_SETS,
    LowerSetPlanner("lower-sets-memory", centric="memory"),
    LowerSetPlanner("lower-sets-exact", family="exact"),
    LowerSetPlanner("lower-sets-exact-memory", family="exact", centric="memory"),
    LowerSetPlanner("lower-sets-no-liveness", liveness=False),
    _DTR,
    SaveSet(),
    SAVE_ALL,
    RECOMPUTE_ALL,
)
_AUTO = ("rk-rotor", "save-set", "rotor", "lower-sets", "lower-sets-memory", "chen", "sequential", "dtr",
         "recompute-all", "checkmate")
"""Planners that ``auto`` asks after the default: those that answer quickly first; the program last, with the
time left."""

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in _SINGLE}
PLANNERS["auto"] = Auto(_DEFAULT, (SAVE_ALL,), tuple(PLANNERS[name] for name in _AUTO))
SENDING = (DEFAULT_PLANNER, "save-set", "auto")
"""Planners that copy data away where it can be sent (`CDGraph.link`); all others only recompute."""
RENAMED = {"keep-set": "save-set"}
"""Old names, understood for one more version."""


@runtime_checkable
class _Configurable(Protocol):
    def with_settings(self, settings: PlannerSettings) -> Planner: ...


def asks(planner: Planner) -> int:
    """Return the length of the longest chain of planners that a planner may ask: 0 for a planner that asks
    none."""
    others = planner.asks if isinstance(planner, Composed) else \
        [p.name for p in getattr(planner, "starts", ())]
    return 1 + max(asks(PLANNERS[name]) for name in others) if others else 0


def planner(name: str, settings: PlannerSettings | None = None) -> Planner:
    """Return a planner by name, under settings where it has any. Raises `ArgumentError` that lists the
    names."""
    if name in RENAMED:
        warn(f"the planner {name!r} is now called {RENAMED[name]!r}; the old name goes with the next version")
        name = RENAMED[name]
    try:
        found = PLANNERS[name]
    except (KeyError, TypeError):
        raise ArgumentError(f"planner is {name!r}; it should be one of {', '.join(PLANNERS)}"
                            ) from None
    return found.with_settings(settings) if settings and isinstance(found, _Configurable) else found
