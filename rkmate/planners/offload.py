"""Add copies to a schedule that exceeds the budget: what is sent away, when it leaves, when it returns.

The order of computations stays as it is. Time is counted in *moments*: a computation, or the loss, with the
steps that free right after it. Copies begin and are waited for at the boundaries between moments; boundary k
stands before moment k.

- `Gaps` are the times between two uses of a forward value, in a schedule without copies: the value can be
  away then.
- A `Placement` is a choice of gaps and the places of their copies. Copies out queue in the order in which
  their data is made, copies back in the order in which it is read. Data leaves at the first boundary by which
  its copy has ended, and is fetched at the last one from which it arrives in time, so that nothing waits.
  Where memory is short, the data of a gap may have to leave sooner or to be fetched later, and the step
  waits for it.
- `offload` chooses the gaps, the one first that helps most at the moments that are above the budget, for the
  seconds of the link that it takes, until no moment is above it. As long as nothing waits, no other choice is
  considered; if that is not enough, data leaves sooner and returns later than the link would have it, where
  the wait is shortest. Then whatever turns out not to be needed is left out again. The simulator judges the
  result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Link
from rkmate.ir.schedule import (
    Compute,
    CopyIn,
    CopyOut,
    Free,
    Leave,
    Loss,
    Schedule,
    Step,
    in_place_donor,
    kernel_of,
)
from rkmate.ir.simulate import Simulation, simulate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Gaps:
    """The moments of a schedule, and its gaps, by D node and then by time: one entry of each array from `d`
    on for each gap."""

    schedule: Schedule
    begins: Ints
    """The index of each moment's first step; at the end, the number of steps."""
    memory: Ints
    """Most bytes during each moment, or right before it."""
    before: Floats
    """Seconds of computing before each boundary."""
    loss: int
    """The moment of the loss."""
    d: Ints
    """The D node."""
    made: Ints
    """The moment that it is made in, before the gap."""
    last: Ints
    """The moment of its last use before the gap."""
    next: Ints
    """The moment of its first use after the gap."""
    may_free: Ints
    """The first boundary at which it may be freed, where it need not be copied first."""
    size: Ints
    """Bytes."""
    out: Floats
    """Seconds of a copy out."""
    back: Floats
    """Seconds of a copy back."""

    @property
    def least(self) -> int:
        """The peak, in bytes, when every value is away during all of its gaps, buffers left out: no copies
        make a smaller one."""
        change = np.zeros(len(self.memory) + 1, dtype=np.int64)
        np.add.at(change, self.last + 1, -self.size)
        np.add.at(change, self.next, self.size)
        return int((self.memory + np.cumsum(change)[:-1]).max(initial=0))


def may_be_sent(graph: CDGraph, *, gradients: bool = False) -> list[bool]:
    """Return for each D node whether it may be away: a forward value that nothing else holds or waits for.
    `gradients`: values of the backward may be away, too."""
    stays = {*graph.held, *graph.outputs, *graph.decided, *graph.forgotten, *graph.input_grads,
             *graph.releases}
    return [made is not None and (gradients or made < graph.loss) and node.size > 0 and j not in stays
            for j, (node, made) in enumerate(zip(graph.d, graph.producer, strict=True))]


def gaps_of(graph: CDGraph, schedule: Schedule) -> Gaps:
    """Return the gaps of a schedule that copies nothing. `graph.link` says how long copies take."""
    assert graph.link is not None
    timeline = simulate(graph, schedule).timeline
    sendable = may_be_sent(graph)
    begins: list[int] = []
    memory: list[int] = []
    seconds: list[float] = []
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    giving: dict[int, bool] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    loss = 0
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            memory[-1] = max(memory[-1], timeline[k])
            continue
        m = len(begins)
        begins.append(k)
        memory.append(timeline[k])
        if isinstance(step, Loss):
            seconds.append(0.0)
            loss = m
            continue
        assert isinstance(step, Compute)
        node, kernel = graph.c[step.c], kernel_of(graph, step)
        seconds.append(kernel.time)
        donor = in_place_donor(graph, schedule.steps, k)
        if donor is not None:       # right before there may be more than there is with its output
            memory[-1] = max(memory[-1], timeline[k] - kernel.overhead - graph.bytes(node.outputs)
                             + graph.d[donor].size)
        for j in set(node.inputs):
            if sendable[j]:
                if used[j] < m - 1:
                    rows.append((j, made[j], used[j], m, used[j] + (2 if giving[j] else 1)))
                used[j], giving[j] = m, j in node.donors
        for j in node.outputs:
            if sendable[j]:
                made[j] = used[j] = m
                giving[j] = False
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    size = np.array([graph.d[j].size for j in table[:, 0]], dtype=np.int64)
    link: Link = graph.link
    d, before, last, following, may_free = (np.ascontiguousarray(table[:, k]) for k in range(5))
    return Gaps(schedule, np.array([*begins, len(schedule.steps)], dtype=np.int64),
                np.array(memory, dtype=np.int64), np.concatenate([[0.0], np.cumsum(seconds)]), loss,
                d, before, last, following, may_free, size,
                np.array([link.seconds_out(n) for n in size.tolist()]),
                np.array([link.seconds_in(n) for n in size.tolist()]))


@dataclass(frozen=True, eq=False)
class Places:
    """Boundaries of some gaps, in order."""

    gap: Ints
    """Index of each gap."""
    first: Bools
    """Whether the gap is the first one in which its D node is away: the copy is made there."""
    begin: Ints
    """Boundary at which the copy out begins, for `first`."""
    leave: Ints
    """Boundary at which the data leaves memory."""
    fetch: Ints
    """Boundary at which the copy back begins."""
    ends: Floats
    """Time at which the copy out has ended, for `first`; else the time of `leave`."""
    starts: Floats
    """Latest time at which the copy back has to begin."""


class Placement:
    """A choice of gaps, and what is known of their places."""

    def __init__(self, gaps: Gaps) -> None:
        self.gaps = gaps
        count, moments = len(gaps.d), len(gaps.memory)
        self.chosen = np.zeros(count, dtype=bool)
        self.leave_by = np.full(count, moments + 1)
        """The boundary that each has to have left by, however long that is waited for."""
        self.fetch_from = np.zeros(count, dtype=np.int64)
        """The boundary that none is fetched before."""
        self.at = gaps.before
        """Time of each boundary, including waits."""
        self._known: Places | None = None

    def changed(self) -> None:
        """Forget the places: the choice, or what is known of it, has changed."""
        self._known = None

    @property
    def places(self) -> Places:
        """The places of the chosen gaps. Asking for them drops gaps by which nothing is gained."""
        while self._known is None:
            found = self._placed(np.flatnonzero(self.chosen))
            useless = found.gap[found.leave >= found.fetch]
            if not len(useless):
                self._known = found
            self.chosen[useless] = False
        return self._known

    def _placed(self, gap: Ints) -> Places:
        gaps = self.gaps
        d = gaps.d[gap]
        first = np.ones(len(gap), dtype=bool)
        first[1:] = d[1:] != d[:-1]
        begin = gaps.made[gap] + 1
        sent = np.flatnonzero(first)
        sent = sent[np.argsort(begin[sent], kind="stable")]
        seconds = np.cumsum(gaps.out[gap[sent]])
        idle = np.maximum.accumulate(self.at[begin[sent]] - np.concatenate([[0.0], seconds[:-1]])) \
            if len(sent) else seconds
        leave = gaps.may_free[gap]
        ends = self.at[leave]
        ends[sent] = seconds + idle
        leave[sent] = np.maximum(gaps.last[gap[sent]] + 1, np.searchsorted(self.at, ends[sent]))
        back = np.argsort(-gaps.next[gap], kind="stable")
        seconds = np.cumsum(gaps.back[gap[back]])
        due = np.minimum.accumulate(self.at[gaps.next[gap[back]]] + np.concatenate([[0.0], seconds[:-1]])) \
            if len(back) else seconds
        starts = np.empty(len(gap))
        starts[back] = due - seconds
        fetch = np.minimum(np.searchsorted(self.at, starts, side="right") - 1, gaps.next[gap])
        leave[sent] = np.minimum(leave[sent], np.maximum(self.leave_by[gap[sent]], gaps.last[gap[sent]] + 1))
        fetch = np.maximum(fetch, np.minimum(self.fetch_from[gap], gaps.next[gap]))
        return Places(gap, first, begin, leave, fetch, ends, starts)

    def profile(self) -> Ints:
        """Return the most bytes during each moment."""
        return self.gaps.memory + self._away(self.places)

    def _away(self, p: Places) -> Ints:
        """Return minus the bytes that are away in each moment."""
        there = p.leave < p.fetch
        change = np.zeros(len(self.gaps.memory) + 1, dtype=np.int64)
        size = self.gaps.size[p.gap[there]]
        np.add.at(change, p.leave[there], -size)
        np.add.at(change, p.fetch[there], size)
        return np.cumsum(change)[:-1]

    @property
    def copied_bytes(self) -> int:
        """Bytes of all copies out."""
        p = self.places
        return int(self.gaps.size[p.gap[p.first]].sum())

    def estimates(self) -> tuple[Ints, Ints, Floats, Floats]:
        """Return, for every gap, chosen or not, as if it were added to the chosen ones: where it would leave
        and be fetched, when its copy out would have ended, and when its copy back has to begin."""
        gaps, p = self.gaps, self.places
        sent = np.flatnonzero(p.first)
        sent = sent[np.argsort(p.begin[sent], kind="stable")]
        begin = gaps.made + 1
        place = np.searchsorted(p.begin[sent], begin, side="right")
        free = np.concatenate([[0.0], p.ends[sent]])[place]
        ends = np.maximum(self.at[begin], free) + gaps.out
        copied = self.copied_before()
        leave = np.where(copied, gaps.may_free, np.maximum(gaps.last + 1, np.searchsorted(self.at, ends)))
        leave = np.minimum(leave, gaps.next)
        ends = np.where(copied, self.at[gaps.may_free], ends)
        back = np.argsort(gaps.next[p.gap], kind="stable")
        place = np.searchsorted(gaps.next[p.gap][back], gaps.next)
        due = np.concatenate([p.starts[back], [np.inf]])[place]
        starts = np.minimum(self.at[gaps.next], due) - gaps.back
        fetch = np.minimum(np.searchsorted(self.at, starts, side="right") - 1, gaps.next)
        leave[p.gap], fetch[p.gap], ends[p.gap], starts[p.gap] = p.leave, p.fetch, p.ends, p.starts
        return leave, fetch, ends, starts

    def copied_before(self) -> Bools:
        """Return, for every gap, whether an earlier gap of its D node is chosen."""
        before = np.cumsum(self.chosen) - self.chosen
        start = np.searchsorted(self.gaps.d, self.gaps.d)
        return before > before[start]

    def sent(self) -> Bools:
        """Return, for every gap, whether its D node is copied out."""
        chosen = np.unique(self.gaps.d[self.chosen])
        return np.isin(self.gaps.d, chosen)

    def waits(self) -> tuple[float, Floats]:
        """Return seconds of waiting for copies, all, and per boundary before it is left."""
        gaps, p = self.gaps, self.places
        there = p.leave < p.fetch
        gap = p.gap[there]
        sent = p.first[there]
        leave, fetch = p.leave[there], p.fetch[there]
        n, m = len(gap), int(sent.sum())
        moments = np.concatenate([p.begin[there][sent], leave[sent], fetch, gaps.next[gap]])
        kinds = np.repeat([0, 1, 2, 3], [m, m, n, n])
        which = np.concatenate([np.flatnonzero(sent), np.flatnonzero(sent), np.arange(n), np.arange(n)])
        # Those that begin at one boundary: in the order of the D nodes, or of who is read first.
        second = np.where(kinds >= 2, gaps.next[gap][which], 0) if n else kinds
        order = np.lexsort((which, second, kinds, moments))
        out, back = gaps.out[gap].tolist(), gaps.back[gap].tolist()
        before = gaps.before.tolist()
        waited = 0.0
        out_free = back_free = 0.0
        ends, arrives = [0.0] * n, [0.0] * n
        at_boundary = np.zeros(len(gaps.before))
        for g, kind, i in zip(moments[order].tolist(), kinds[order].tolist(), which[order].tolist(),
                              strict=True):
            now = before[g] + waited
            if kind == 0:
                out_free = ends[i] = max(now, out_free) + out[i]
            elif kind == 2:
                back_free = arrives[i] = max(now, back_free) + back[i]
            else:
                late = (ends[i] if kind == 1 else arrives[i]) - now
                if late > 0:
                    waited += late
                    at_boundary[g] += late
        return waited, at_boundary


ROUNDS = 4
"""Number of times that the choice is made again with the waits of the previous one."""
SMALL_GAPS = 96
"""Up to how many chosen gaps each is tried without, where something is waited for."""
NEGLIGIBLE = 5e-5
"""Share of the seconds of a step that any copy costs, so that useless copies are avoided."""
STEP = 0.2
"""Part of the excess at the worst moment that is chosen at a time."""
AHEAD = 2.0
"""How much earlier than it must a copy back begins where there is room, in times of its seconds, and how much
later data leaves: copies are not always as fast as they were measured."""


@dataclass(frozen=True)
class Offloaded:
    """A schedule with copies, within its budget."""

    schedule: Schedule
    simulation: Simulation


def offload(graph: CDGraph, schedule: Schedule, budget: int, *,
            until: float = float("inf")) -> Offloaded | None:
    """Return the schedule with copies that keep it within `budget` bytes, waiting as little as is known.

    Return None where no copies do, or where the time (`until`, of `time.perf_counter`) is over. `schedule`
    copies nothing itself; if it fits without copies, it is returned.
    """
    gaps = gaps_of(graph, schedule)
    link = graph.link
    assert link is not None
    if int(gaps.memory.max(initial=0)) <= budget:
        return judged_within(graph, schedule, budget)
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
        waits = without_each(placement, limit, waits, until)
    found = judged_within(graph, with_copies(placement), budget)
    _give_room(placement, limit)
    easy = judged_within(graph, with_copies(placement), budget)
    if found is None or (easy is not None and easy.simulation.seconds <= found.simulation.seconds):
        found = easy
    return found


def judged_within(graph: CDGraph, schedule: Schedule, budget: int) -> Offloaded | None:
    """Simulate a schedule; return None if it needs more memory than the budget, or more room at the other end
    of the link than there is."""
    result = simulate(graph, schedule)
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


def without_each(placement: Placement, limit: int, waits: float, until: float) -> float:
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
    """Return the schedule with the steps of the copies."""
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
