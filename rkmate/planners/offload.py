"""Copies for a schedule that needs more than the budget: what is sent away, when it leaves, when it returns.

What is computed when stays as it is. Gaps between two uses of a forward value are chosen, the one first that
helps most at the moments that are above the budget, for the seconds of the link that it takes, until no
moment is above it. While nobody has to wait, nothing else is looked at; where that is not enough, data leaves
sooner and returns later than the link would have it, where that is waited for least. Then whatever turns out
not to be needed is left out again. The simulator has the last word.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import CopyIn, CopyOut, Free, Leave, Schedule, Step
from rkmate.ir.simulate import Simulation, simulate
from rkmate.planners.offload_gaps import Gaps, gaps_of
from rkmate.planners.offload_place import Placement

ROUNDS = 4
"""How often the choice is made anew, with what the one before knows of the waits."""
SMALL_GAPS = 96
"""Up to how many chosen gaps each is tried without, where something is waited for."""
NEGLIGIBLE = 5e-5
"""Of the seconds of a step: what any copy is worth not being made."""
STEP = 0.2
"""How much of what is too much at the worst moment is chosen at a time."""
AHEAD = 2.0
"""How much earlier than it must a copy back begins where there is room, in times of its seconds, and how much
later data leaves: copies are not always as fast as they were measured."""


@dataclass(frozen=True)
class Offloaded:
    """A schedule with copies, within its budget."""

    schedule: Schedule
    simulation: Simulation


def offload(graph: CDGraph, schedule: Schedule, budget: int, *, pinned: Collection[int] = (),
            reserve_at_loss: int = 0, until: float = float("inf"),
            gaps: Gaps | None = None) -> Offloaded | None:
    """The schedule with copies that keep it within `budget` bytes, waiting as little as is known; None where
    none do, or the time (of `time.perf_counter`) is over. `schedule` copies nothing itself. `gaps`: its own,
    where they are known. Without need, the schedule itself.
    """
    gaps = gaps or gaps_of(graph, schedule, pinned, reserve_at_loss)
    link = graph.link
    assert link is not None
    if int(gaps.memory.max(initial=0)) <= budget:
        return _judged(graph, schedule, budget, pinned, reserve_at_loss)
    limit = budget - link.buffer_bytes
    if gaps.least > limit:
        return None
    best: tuple[float, Placement] | None = None
    at = gaps.before
    for _ in range(ROUNDS):
        placement = Placement(gaps)
        placement.at = at
        if not _choose(placement, limit, link.most_bytes, until):
            break
        _drop_needless(placement, limit)
        waits, at_boundary = placement.waits()
        if best is None or waits < best[0] * (1 - 1e-9):
            best = waits, placement
        else:
            break
        if not waits:
            break
        at = gaps.before + np.concatenate([[0.0], np.cumsum(at_boundary)[:-1]])
    if best is None:
        return None
    waits, placement = best
    if waits:
        waits = _without_each(placement, limit, waits, until)
    found = _judged(graph, with_copies(placement), budget, pinned, reserve_at_loss)
    _give_room(placement, limit)
    easy = _judged(graph, with_copies(placement), budget, pinned, reserve_at_loss)
    if found is None or (easy is not None and easy.simulation.seconds <= found.simulation.seconds):
        found = easy
    return found


def _judged(graph: CDGraph, schedule: Schedule, budget: int, pinned: Collection[int],
            reserve_at_loss: int) -> Offloaded | None:
    result = simulate(graph, schedule, pinned=pinned, reserve_at_loss=reserve_at_loss)
    most = None if graph.link is None else graph.link.most_bytes
    fits = result.peak <= budget and (most is None or result.away <= most)
    return Offloaded(schedule, result) if fits else None


def _choose(placement: Placement, limit: int, most_bytes: int | None, until: float) -> bool:
    """Choose gaps until every moment is within the limit. Whether that is so in the end."""
    gaps = placement.gaps
    seconds = gaps.out + gaps.back + NEGLIGIBLE * gaps.before[-1] + 1e-12
    asked = np.zeros(len(gaps.d), dtype=bool)
    for round_ in range(20 * len(gaps.d) + 20):
        over = placement.profile() - limit
        if int(over.max(initial=0)) <= 0:
            return True
        if round_ % 16 == 15 and time.perf_counter() > until:
            return False
        sent = placement.sent()
        allowed = np.ones(len(gaps.d), dtype=bool) if most_bytes is None else \
            sent | (gaps.size <= most_bytes - placement.copied_bytes)
        leave, fetch, ends, starts = placement.estimates()
        above = np.maximum(over, 0)
        total = np.concatenate([[0], np.cumsum(above)])
        count = np.concatenate([[0], np.cumsum(above > 0)])
        covered = np.maximum(fetch, leave)
        gain = np.minimum(gaps.size * (count[covered] - count[leave]), total[covered] - total[leave])
        gain[asked | placement.chosen | ~allowed] = 0
        if gain.any():
            score = gain / np.where(sent, seconds - gaps.out, seconds)
            most = np.argsort(-score, kind="stable")[:int(np.count_nonzero(gain))]
            if most_bytes is None:
                most = most[:np.searchsorted(np.cumsum(gaps.size[most]), STEP * int(over.max())) + 1]
            else:
                most = most[:1]
            asked[most] = placement.chosen[most] = True
            placement.changed()
            continue
        # Nothing more without waiting: at the first such moment, what makes wait least for its bytes.
        first = int(np.argmax(over > 0))
        free = np.where(placement.copied_before(), gaps.may_free, gaps.last + 1)
        inside = (gaps.last < first) & (first < gaps.next) & (free <= first) & allowed \
            & ~(placement.chosen & (leave <= first) & (first < fetch))
        if not inside.any():
            return False
        leaves = np.where(first < leave, np.maximum(ends - placement.at[first], 0.0), 0.0)
        arrives = np.where(first >= fetch, np.maximum(placement.at[first + 1] - starts, 0.0), 0.0)
        price = (leaves + arrives + 1e-3 * np.where(placement.chosen, 0.0, seconds)) \
            / np.minimum(gaps.size, over[first])
        best = int(np.argmin(np.where(inside, price, np.inf)))
        # One that is chosen again was pushed out by others: now it stays, or they would take turns for ever.
        again = asked[best] and not placement.chosen[best]
        asked[best] = placement.chosen[best] = True
        placement.at = placement.at.copy()
        if first < leave[best] or again:
            placement.leave_by[best] = min(placement.leave_by[best], first)
            placement.at[first + 1:] += leaves[best]
        if first >= fetch[best] or again:
            placement.fetch_from[best] = max(placement.fetch_from[best], first + 1)
            placement.at[int(gaps.next[best]) + 1:] += arrives[best]
        placement.changed()
    return False


def _drop_needless(placement: Placement, limit: int) -> None:
    """Leave out what no moment needs, the dearest copies first."""
    gaps = placement.gaps
    chosen = np.flatnonzero(placement.chosen)
    room = limit - placement.profile()
    places = placement.places
    window = dict(zip(places.gap.tolist(), zip(places.leave.tolist(), places.fetch.tolist(), strict=True),
                      strict=True))
    for i in sorted(chosen.tolist(), key=lambda i: (-(gaps.out[i] + gaps.back[i]), i)):
        leave, fetch = window[i]
        if int(room[leave:fetch].min(initial=limit)) >= gaps.size[i]:
            room[leave:fetch] -= gaps.size[i]
            placement.chosen[i] = False
    placement.changed()
    if int(placement.profile().max(initial=0)) > limit:     # a later gap now waits for its copy out
        placement.chosen[chosen] = True
        placement.changed()


def _without_each(placement: Placement, limit: int, waits: float, until: float) -> float:
    """Leave out single gaps while less is waited for without them, and there is time. Returns the waits that
    are left."""
    chosen = np.flatnonzero(placement.chosen)
    if len(chosen) > SMALL_GAPS:
        return waits
    for i in chosen.tolist():
        if time.perf_counter() > until:
            break
        kept = placement.chosen.copy()
        placement.chosen[i] = False
        placement.changed()
        if int(placement.profile().max(initial=0)) <= limit:
            without, _ = placement.waits()
            if without <= waits:
                waits = without
                continue
        placement.chosen = kept
        placement.changed()
    return waits


def _give_room(placement: Placement, limit: int) -> None:
    """Let data leave later and return sooner than it must, where there is room: copies may be slower than
    they are said to be."""
    gaps, p = placement.gaps, placement.places
    room = limit - placement.profile()
    earliest = 0
    for k in np.argsort(gaps.next[p.gap], kind="stable").tolist():
        i, leave, fetch = int(p.gap[k]), int(p.leave[k]), int(p.fetch[k])
        size, ahead = int(gaps.size[i]), AHEAD * float(gaps.back[i])
        full = leave + np.flatnonzero(room[leave:fetch] < size)
        if len(full):
            first = int(np.searchsorted(placement.at, placement.at[fetch] - ahead))
            sooner = max(int(full[-1]) + 1, earliest, first)
            if sooner < fetch:
                room[sooner:fetch] -= size
                p.fetch[k] = sooner
            later = min(int(full[0]), int(np.searchsorted(
                placement.at, placement.at[leave] + AHEAD * float(gaps.out[i]))))
            if p.first[k] and leave < later:
                room[leave:later] -= size
                p.leave[k] = later
        earliest = max(earliest, int(p.fetch[k]))


def with_copies(placement: Placement) -> Schedule:
    """The schedule with the steps of the copies."""
    gaps, p = placement.gaps, placement.places
    extra: dict[int, list[tuple[int, int, int, Step]]] = {}
    for k, (i, first) in enumerate(zip(p.gap.tolist(), p.first.tolist(), strict=True)):
        d, leave, fetch = int(gaps.d[i]), int(p.leave[k]), int(p.fetch[k])
        if first:
            extra.setdefault(int(p.begin[k]), []).append((0, 0, k, CopyOut(d)))
        extra.setdefault(leave, []).append((1, 0, k, Leave(d) if first else Free(d)))
        extra.setdefault(fetch, []).append((2, int(gaps.next[i]), k, CopyIn(d)))
    steps: list[Step] = []
    source = gaps.schedule.steps
    begins = gaps.begins.tolist()
    for m, (begin, end) in enumerate(zip(begins, begins[1:], strict=False)):
        steps += [row[3] for row in sorted(extra.get(m, ()), key=lambda row: row[:3])]
        steps += source[begin:end]
    return Schedule(tuple(steps))
