"""Plans that were searched for, on disk: another process on the same model and machine need not search.

An entry is one JSON file in the cache folder: the variant of the graph, its schedule, and what the search
said of it. Its name is a hash of everything that the search depends on: the graph of the first variant with
its costs, the budget, the planner, the settings and the versions. The rest of the plan is made from the
captured model. The simulator judges the schedule again, and an entry that does not have the peak and the time
that it says is not used: an old, broken or edited file costs a search, and never gives a wrong plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rkmate import device as devices
from rkmate.errors import RkmateError
from rkmate.ilp import cache_folder
from rkmate.ir.plan import BlockInfo, Run, read_step, step_content
from rkmate.ir.schedule import Schedule
from rkmate.pipeline.attempts import Planned, plan_of
from rkmate.pipeline.prepare import Blocked, Prepared, block, compiled_by, prepare
from rkmate.pipeline.settings import RunSettings
from rkmate.pipeline.variants import Variant, named
from rkmate.planners.protocol import Outcome
from rkmate.show.plan import Plan
from rkmate.support.cache import keep_newest, read_json, write_json
from rkmate.support.warn import PACKAGE

FORMAT = 1
"""Grows when the content of an entry changes its meaning."""
_FIELDS = ("peak_bytes", "step_seconds", "bound_seconds", "minimum_bytes", "note", "baseline_peak_bytes",
           "baseline_seconds", "first_seconds")
Reason = tuple[str, str]
"""Why a variant was taken, and what the settings that forbid it would do: the parts of a warning."""


def place_of(prepared: Prepared, limit: int, planner: str) -> Path | None:
    """Return the file of what was found for a budget of `limit` bytes; None if plans like this one are not
    remembered: where data goes is measured anew in each process.

    `prepared`: the first variant.
    """
    settings, link = prepared.settings, prepared.graph.link
    if settings.offload is not None or link is not None:
        return None
    device = devices.of(prepared.device)
    content = [
        FORMAT, _version(), str(torch.__version__), compiled_by(settings),
        device.key() if device.elsewhere is None else device.elsewhere.name, prepared.blocked.fingerprint,
        prepared.blocked.traced.wanted, prepared.blocked.variant.name,
        [prepared.costs[i].row() for i in range(len(prepared.graph.c))],
        prepared.pinned, prepared.reserve_at_loss, limit, planner, repr(settings.of_planner),
        repr(replace(settings, run=RunSettings()))]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return cache_folder() / "plans" / f"{name}.json"


@functools.cache
def _version() -> tuple[int, int]:
    """Return the number of the package's source files, and when the newest of them was changed: planners
    differ between versions, and in a source tree from one edit to the next."""
    files = [f.stat().st_mtime_ns for f in PACKAGE.rglob("*.py")]
    return len(files), max(files)


def recall(place: Path, prepared: Prepared, limit: int, planner: str,
           blocks: Mapping[Variant, Blocked]) -> tuple[Planned, Reason] | None:
    """Return what was found before, on the variant of the graph that it belongs to; None where nothing was.
    `blocks`: variants that were cut into blocks before."""
    entry = read_json(place)
    if entry is None:
        return None
    start, traced = time.perf_counter(), prepared.blocked.traced
    try:
        variant, schedule = named(entry["variant"]), Schedule(tuple(map(read_step, entry["steps"])))
        here = prepared if variant == prepared.blocked.variant else prepare(
            traced, blocked=blocks.get(variant) or block(traced, variant), limit=lambda blocked: limit)
        if here.blocked.fingerprint != entry["fingerprint"]:
            return None
        peak, result = here.peak(schedule, here.settings.calls), here.simulate(schedule)
        if peak != entry["peak_bytes"] or peak > limit \
                or not math.isclose(result.seconds, entry["step_seconds"], rel_tol=1e-9):
            return None
        plan = plan_of(here, None, planner, limit, Outcome(schedule, "ok", result.seconds))
        plan = replace(plan, schedule=schedule, runs=tuple(Run(**r) for r in entry["runs"]),
                       blocks=tuple(BlockInfo(**b) for b in entry["blocks"]),
                       **{field: entry[field] for field in _FIELDS})
        orders = tuple(tuple(tuple(map(int, order)) for order in options) for options in entry["orders"])
        why, instead = map(str, entry["reason"])
    except (ValueError, KeyError, TypeError, IndexError, RkmateError):
        return None         # broken, or edited: it will be replaced
    plan = replace(plan, stage_seconds={**plan.stage_seconds, "found on disk": time.perf_counter() - start})
    return Planned(plan, here, orders, str(entry["said"])), (why, instead)


def remember(place: Path, planned: Planned, reason: Reason) -> None:
    """Write what a search has found. A folder that cannot be written costs time later, nothing else."""
    plan: Plan = planned.plan
    entry: dict[str, Any] = {
        "variant": plan.variant, "fingerprint": plan.fingerprint,
        "steps": [step_content(s) for s in plan.schedule.steps], "runs": [vars(r) for r in plan.runs],
        "blocks": [vars(b) for b in plan.blocks], **{f: getattr(plan, f) for f in _FIELDS},
        "orders": planned.orders, "said": planned.said, "reason": reason}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, entry)
        keep_newest(place.parent)
    except OSError:
        return
