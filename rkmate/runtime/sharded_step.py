"""A step of a sharded model, measured: what it shows of the bytes outside of the plans of its layers.

No plan knows what else a step takes: gathered parameters, their gradients, buffers of the exchange. So a step
is measured from moment to moment, and what the planned calls hold at each is taken off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rkmate.device.protocol import PartsMeter
from rkmate.planners.several_calls import Moment, Way
from rkmate.runtime.module import PlannedModule
from rkmate.runtime.observed_step import MOST
from rkmate.runtime.one_budget import Part, Rest
from rkmate.runtime.segments import Call
from rkmate.torch_seam.tensors import after_backward


class Observed:
    """A step in which memory is measured from moment to moment."""

    def __init__(self, meter: PartsMeter) -> None:
        """Raises `MeterError` where something else measures."""
        self._meter = meter
        self._session = ExitStack()
        self._session.enter_context(meter.running())
        self._stretch = ExitStack()
        self._stretches: list[tuple[int | None, tuple[int, ...]]] = []
        """Of each stretch of the step, the number of the planned call that runs, and of those that hold."""
        self._holding: dict[int, None] = {}
        self.calls: list[tuple[Any, Part, Way]] = []
        """The planned calls, and what each follows."""
        self._waits = self._is_over = False
        self._next(None)

    def _next(self, running: int | None) -> None:
        if self._is_over:
            return
        self._stretch.close()
        self._stretch.enter_context(self._meter.part(len(self._stretches)))
        self._stretches.append((running, tuple(self._holding)))

    def forward_begins(self) -> None:
        """Note that a planned call begins."""
        self._next(len(self.calls))

    def forward_over(self, call: Call, follower: PlannedModule, part: Part, way: Way) -> None:
        """Note that a planned call has returned."""
        number = len(self.calls)
        self.calls.append((follower, part, way))
        self._holding[number] = None
        self._next(None)
        begins, finished = call.begins, call.finished

        def began(grads: Any) -> None:
            if not self._waits:
                self._waits = True
                after_backward(self._end)
            self._holding.pop(number, None)
            self._next(number)
            if begins is not None:
                begins(grads)

        def over() -> None:
            self._next(None)
            if finished is not None:
                finished()

        call.begins, call.finished = began, over

    def _end(self) -> None:
        """The backward is over. The measurement goes on: what a thread has begun, autograd's engine gives it
        back after this."""
        self._is_over = True
        self._stretch.close()

    def close(self) -> None:
        """End the measurement."""
        self._end()
        self._session.close()

    @property
    def peak(self) -> int:
        """Bytes of the step, at most."""
        return max((peak for _, peak in self._meter.levels().values()), default=0)

    def rest(self) -> Rest | None:
        """Return what was outside of all plans; None if the backward has not come to its end."""
        if not self._waits or self._holding:
            return None
        levels = self._meter.levels()
        beside = alone = early = plain = 0
        moments: dict[tuple[int | None, tuple[int, ...]], int] = {}
        least = {n: part.least_saved for n, (_, part, _) in enumerate(self.calls)}
        for k, (running, holding) in enumerate(self._stretches):
            begin, peak = levels.get(k, (0, 0))
            held = sum(self.calls[n][2].saved for n in holding)
            whole = sum(self.calls[n][1].whole.saved for n in holding)
            # All that hold nothing now are counted as if they held what they hold at least.
            absent = sum(bytes_ for n, bytes_ in least.items() if n not in holding and n != running)
            if running is not None and running < len(self.calls):
                _, part, way = self.calls[running]
                own = 0 if running not in self._of_backward(k) else way.saved
                base = max(begin - own, peak - way.saved - way.extra) - held
                beside = max(beside, base - absent)
                plain = max(plain, base + whole + part.whole.saved + part.whole.extra)
            else:
                running = None
                base = peak - held
                plain = max(plain, base + whole)
                if holding:
                    alone = max(alone, base - absent)
                else:
                    early = max(early, base)
            moments[running, holding] = max(base, moments.get((running, holding), 0))
        return Rest(beside, alone, early, plain, moments if len(self.calls) <= MOST else {})

    def _of_backward(self, stretch: int) -> set[int]:
        """Return the calls that have run before a stretch."""
        return {n for n, _ in self._stretches[:stretch] if n is not None}


def bounds(rest: Rest, item_of: Sequence[int]) -> list[Moment]:
    """Return the moments of a step as bounds on schedules. `item_of`: the item of each call."""
    return [Moment(size, Counter(item_of[n] for n in (*holding, *(() if running is None else (running,)))),
                   None if running is None else item_of[running])
            for (running, holding), size in rest.moments.items()]
