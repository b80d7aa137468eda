"""Dynamic tensor rematerialization: training inside a budget without a plan.

``with rkmate.dtr(budget="2GiB"): ...`` runs a block of a program inside a budget;
``rkmate.dtr.wrap(model, budget=...)`` returns a module whose steps run inside a budget. The algorithm
and its heuristics are those of Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021.
``simulate`` replays logs of operations as the paper's simulator does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rkmate.support.lazy import lazy_names

_PLACES = {
    "rkmate.dtr.errors": ("BudgetExceeded", "LogError", "RuntimeStateError", "ThrashingError"),
    "rkmate.dtr.heuristics": ("HEURISTICS", "make_heuristic"),
    "rkmate.dtr.log": ("Program", "parse_log", "read_log"),
    "rkmate.dtr.runtime.memory": ("Report",),
    "rkmate.dtr.session": ("Session",),
    "rkmate.dtr.simulator": ("Result", "Trace", "simulate"),
    "rkmate.dtr.wrapping": ("DynamicModule", "wrap"),
}
"""The module in which each public name is defined. The simulator, the heuristics and the log load no
torch."""

__all__ = sorted(name for names in _PLACES.values() for name in names)

if TYPE_CHECKING:
    from rkmate.dtr.errors import BudgetExceeded as BudgetExceeded
    from rkmate.dtr.errors import LogError as LogError
    from rkmate.dtr.errors import RuntimeStateError as RuntimeStateError
    from rkmate.dtr.errors import ThrashingError as ThrashingError
    from rkmate.dtr.heuristics import HEURISTICS as HEURISTICS
    from rkmate.dtr.heuristics import make_heuristic as make_heuristic
    from rkmate.dtr.log import Program as Program
    from rkmate.dtr.log import parse_log as parse_log
    from rkmate.dtr.log import read_log as read_log
    from rkmate.dtr.runtime.memory import Report as Report
    from rkmate.dtr.session import Session as Session
    from rkmate.dtr.simulator import Result as Result
    from rkmate.dtr.simulator import Trace as Trace
    from rkmate.dtr.simulator import simulate as simulate
    from rkmate.dtr.wrapping import DynamicModule as DynamicModule
    from rkmate.dtr.wrapping import wrap as wrap

__getattr__, __dir__ = lazy_names(__name__, _PLACES)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Session:
        """Return a ``Session`` with these arguments."""
        from rkmate.dtr.session import Session

        return Session(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
