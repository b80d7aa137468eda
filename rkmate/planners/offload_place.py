"""Where the steps of copies stand, for a choice of gaps: when each copy begins, when its data leaves, when it
is fetched.

Copies out queue in the order in which their data is made, copies back in the order in which it is read. Data
leaves at the first boundary by which its copy has ended, and is fetched at the last one from which it arrives
in time: nothing waits then. Where memory is short, a gap's data may have to leave sooner or to be fetched
later, and that is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rkmate.planners.offload_gaps import Bools, Floats, Gaps, Ints


@dataclass(frozen=True, eq=False)
class Places:
    """For some gaps, in order: boundaries."""

    gap: Ints
    """Which of the gaps."""
    first: Bools
    """Whether it is the first one that its D node is away in: there it is copied."""
    begin: Ints
    """Where the copy out begins, for `first`."""
    leave: Ints
    """Where it leaves memory."""
    fetch: Ints
    """Where the copy back begins."""
    ends: Floats
    """When the copy out has ended, for `first`; else the time of `leave`."""
    starts: Floats
    """When the copy back has to begin at the latest."""


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
        """When each boundary is reached, waits included."""
        self._known: Places | None = None

    def changed(self) -> None:
        """The choice, or what is known of it, has changed."""
        self._known = None

    @property
    def places(self) -> Places:
        """Of the gaps that are chosen; one that nothing is gained by is not chosen any more."""
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
        """Most bytes during each moment."""
        return self.gaps.memory + self._away(self.places)

    def _away(self, p: Places) -> Ints:
        """Minus the bytes that are away in each moment."""
        there = p.leave < p.fetch
        change = np.zeros(len(self.gaps.memory) + 1, dtype=np.int64)
        size = self.gaps.size[p.gap[there]]
        np.add.at(change, p.leave[there], -size)
        np.add.at(change, p.fetch[there], size)
        return np.cumsum(change)[:-1]

    @property
    def copied_bytes(self) -> int:
        """Of all copies out."""
        p = self.places
        return int(self.gaps.size[p.gap[p.first]].sum())

    def estimates(self) -> tuple[Ints, Ints, Floats, Floats]:
        """For every gap, chosen or not: where it would leave and be fetched, when its copy out would have
        ended, and when its copy back has to begin, if it were added to those that are chosen."""
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
        """For every gap, whether an earlier one of its D node is chosen."""
        before = np.cumsum(self.chosen) - self.chosen
        start = np.searchsorted(self.gaps.d, self.gaps.d)
        return before > before[start]

    def sent(self) -> Bools:
        """For every gap, whether its D node is copied out."""
        chosen = np.unique(self.gaps.d[self.chosen])
        return np.isin(self.gaps.d, chosen)

    def waits(self) -> tuple[float, Floats]:
        """Seconds of waiting for copies, all, and per boundary before it is left."""
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
