"""Options of the package's calls, for helpers of tests that take many of them by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import rkmate
from rkmate.ilp import settings as ilp_settings
from rkmate.ilp.settings import OptionSettings
from rkmate.planners import settings as planner_settings
from rkmate.planners.settings import PlannerSettings
from rkmate.settings import OPTIONS

FEW_OPTIONS = OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0)

_SETTINGS = {f.name for f in fields(rkmate.Settings)} - set(OPTIONS)
_RUN = {f.name for f in fields(rkmate.RunSettings)}


def options_of(*, offload_bytes: int | str | None = None, **named: Any) -> dict[str, Any]:
    """Sort keyword arguments: fields of `rkmate.Settings` and `rkmate.RunSettings` go into ``settings=``, on
    top of the settings that are given; all else stays as it is. A field that is None is left out."""
    if offload_bytes is not None:
        named["offload"] = rkmate.Offload(named["offload"], offload_bytes)
    run = {k: named.pop(k) for k in _RUN & set(named)}
    more = {k: named.pop(k) for k in _SETTINGS & set(named)}
    settings = named.pop("settings", None) or rkmate.Settings()
    if isinstance(settings.planner, rkmate.PlannerSettings) and isinstance(more.get("planner"), str):
        more["planner"] = replace(settings.planner, name=more["planner"])
    settings = replace(settings, **{k: v for k, v in more.items() if v is not None})
    settings = replace(settings, run=replace(settings.run, **{k: v for k, v in run.items() if v is not None}))
    return named if settings == rkmate.Settings() else {**named, "settings": settings}


@contextmanager
def few_seconds() -> Iterator[None]:
    """Search briefly by default: most tests need some plan within a budget, and no better one for seconds of
    solving. The smallest budget is the chain's, made to fit into less: what the integer program adds to it
    would depend on the clock."""
    quick = PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0)
    with ilp_settings.DEFAULT.within(FEW_OPTIONS), planner_settings.DEFAULT.within(quick):
        yield
