"""All planners by name. The order is the order in which tables list them."""

from __future__ import annotations

from rkmate.errors import ArgumentError
from rkmate.planners.auto import Auto
from rkmate.planners.chain_programs import ChainProgram
from rkmate.planners.checkmate import CheckmatePlanner
from rkmate.planners.checkmate_lp import CheckmateRounded
from rkmate.planners.chen import Chen
from rkmate.planners.dtr_offline import DtrOffline
from rkmate.planners.ends import RecomputeAll, SaveAll
from rkmate.planners.lower_set_planner import LowerSetPlanner
from rkmate.planners.protocol import Planner
from rkmate.planners.save_set import KeepSet
from rkmate.planners.sequential import Sequential

_ROCKMATE, _DTR, _LOWER_SETS = ChainProgram("rockmate"), DtrOffline(), LowerSetPlanner("lower-sets")
_SINGLE: tuple[Planner, ...] = (
    _ROCKMATE,
    ChainProgram("rotor"),
    ChainProgram("revolve"),
    Sequential(),
    Chen(),
    CheckmatePlanner(starts=(_ROCKMATE, _DTR, _LOWER_SETS)),
    CheckmateRounded(),
    _LOWER_SETS,
    LowerSetPlanner("lower-sets-memory", centric="memory"),
    LowerSetPlanner("lower-sets-exact", family="exact"),
    LowerSetPlanner("lower-sets-exact-memory", family="exact", centric="memory"),
    LowerSetPlanner("lower-sets-no-liveness", liveness=False),
    _DTR,
    KeepSet(),
    SaveAll(),
    RecomputeAll(),
)
_AUTO = ("save-all", "rockmate", "keep-set", "rotor", "lower-sets", "lower-sets-memory", "chen",
         "sequential", "dtr", "recompute-all", "checkmate")
"""What ``auto`` asks, the quickest to answer first; the program last, with the time left."""

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in _SINGLE}
PLANNERS["auto"] = Auto(tuple(PLANNERS[name] for name in _AUTO))


def planner(name: str) -> Planner:
    """A planner by name. Raises `ArgumentError` that lists the names."""
    try:
        return PLANNERS[name]
    except KeyError:
        raise ArgumentError(f"planner is {name!r}; it should be one of {', '.join(PLANNERS)}"
                            ) from None
