"""Options of the package's calls, for helpers of tests that take many of them by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import rkmate
from rkmate.settings import OPTIONS

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
