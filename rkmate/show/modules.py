"""What a plan keeps, sends away, forgets and redoes, by the modules of the user's model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rkmate.show.replay import Occupancy

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module path that is a number: the place in a list of modules."""


@dataclass(frozen=True)
class ModuleRow:
    """One module path. Bytes stand between forward and backward; seconds are of one step."""

    path: str
    kept_bytes: int
    forgotten_bytes: int
    """Kept without rematerialization, and neither kept nor sent away by the plan."""
    recomputed_seconds: float
    recomputed: tuple[str, ...]
    """Operations that run again, each once."""
    modules: int = 1
    """How many modules the row stands for."""
    away_bytes: int = 0
    """Of what the forward leaves to the backward elsewhere."""


def by_module(replayed: Occupancy, baseline: Occupancy) -> tuple[ModuleRow, ...]:
    """One row for each module that keeps, sends away, forgets or redoes something; most forgotten first."""
    g = replayed.graph
    kept: dict[str, int] = {}
    away: dict[str, int] = {}
    forgotten: dict[str, int] = {}
    seconds: dict[str, float] = {}
    again: dict[str, dict[str, None]] = {}
    for path, total in _sizes(replayed, replayed.alive_at_loss):
        kept[path] = kept.get(path, 0) + total
    for path, total in _sizes(replayed, replayed.away_at_loss):
        away[path] = away.get(path, 0) + total
    for path, total in _sizes(replayed,
                              baseline.alive_at_loss - replayed.alive_at_loss - replayed.away_at_loss):
        forgotten[path] = forgotten.get(path, 0) + total
    for i, t in replayed.recomputed_seconds.items():
        c = g.computations[i]
        seconds[c.path] = seconds.get(c.path, 0.0) + t
        again.setdefault(c.path, {})[c.operation] = None
    rows = [ModuleRow(p, kept.get(p, 0), forgotten.get(p, 0), seconds.get(p, 0.0),
                      tuple(again.get(p, ())), away_bytes=away.get(p, 0))
            for p in {**kept, **away, **forgotten, **seconds}]
    return tuple(sorted(rows, key=lambda r: (-r.forgotten_bytes, -r.recomputed_seconds,
                                             -r.kept_bytes, r.path)))


def alike(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Modules whose paths differ in numbers alone as one row: ``layers.*.mlp``, with their sums."""
    groups: dict[str, list[ModuleRow]] = {}
    for row in rows:
        groups.setdefault(_NUMBER.sub("*", row.path), []).append(row)
    return tuple(same[0] if len(same) == 1 else ModuleRow(
        pattern, sum(r.kept_bytes for r in same), sum(r.forgotten_bytes for r in same),
        sum(r.recomputed_seconds for r in same),
        tuple(dict.fromkeys(o for r in same for o in r.recomputed)), len(same),
        sum(r.away_bytes for r in same))
        for pattern, same in groups.items())


def _sizes(replayed: Occupancy, storages: Iterable[int]) -> list[tuple[str, int]]:
    g = replayed.graph
    found = []
    for j in sorted(storages):
        maker = g.maker[j]
        if maker is not None and g.storages[j].kind != "grad":
            found.append((g.computations[maker].path, g.storages[j].size))
    return found
