"""Budgets inside of the libraries that people train with."""

import typing

from rkmate.support.lazy import lazy_names as _lazy_names

_PLACES = {
    "rkmate.integrations.plan_log": ("PlanLog",),
    "rkmate.integrations.trainer": ("BudgetCallback",),
}
"""The module in which each name is defined: it is loaded on first use."""
__all__ = sorted(name for names in _PLACES.values() for name in names)

if typing.TYPE_CHECKING:
    from rkmate.integrations.plan_log import PlanLog as PlanLog
    from rkmate.integrations.trainer import BudgetCallback as BudgetCallback


__getattr__, __dir__ = _lazy_names(__name__, _PLACES)
