"""Dynamic tensor rematerialization: training inside a budget without a plan.

``with rkmate.dtr(budget="2GiB"): ...`` runs a block of a program inside a budget, and
``rkmate.dtr.wrap(model, budget=...)`` a module. The algorithm and its heuristics are those of
Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021; ``simulate`` replays logs of
operations as the paper's simulator does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from rkmate.dtr.errors import BudgetExceeded, LogError, RuntimeStateError, ThrashingError
from rkmate.dtr.heuristics import HEURISTICS, make_heuristic
from rkmate.dtr.log import Program, parse_log, read_log
from rkmate.dtr.runtime.report import Report
from rkmate.dtr.session import Session
from rkmate.dtr.simulator import Result, Trace, simulate
from rkmate.dtr.wrapping import DynamicModule, wrap

__all__ = [
    "HEURISTICS",
    "BudgetExceeded",
    "DynamicModule",
    "LogError",
    "Program",
    "Report",
    "Result",
    "RuntimeStateError",
    "Session",
    "ThrashingError",
    "Trace",
    "make_heuristic",
    "parse_log",
    "read_log",
    "simulate",
    "wrap",
]


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Session:
        """A ``Session``: see there for the arguments."""
        return Session(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
