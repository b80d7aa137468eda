"""Where each D node of a replayed schedule is: absent, on the device, away, or on its way."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rkmate.errors import ScheduleError

if TYPE_CHECKING:
    from rkmate.ir.cd import CDGraph


class Residency:
    """What is away, and what is being copied. Checks each step of it; raises `ScheduleError`."""

    def __init__(self, graph: CDGraph, pinned: Collection[int]) -> None:
        self.graph = graph
        self.pinned = pinned
        self.leaving: set[int] = set()
        """Being copied out, still in memory."""
        self.away: set[int] = set()
        """With a copy that is away, to the end of the step."""
        self.coming: set[int] = set()
        """Being copied back, not read yet."""
        self.bytes = 0
        """Away. What is away stays there: never more than at the end of the step."""

    def read(self, d: int) -> None:
        """A computation reads it, and has waited for it."""
        self.coming.discard(d)

    def make(self, d: int, step: int) -> None:
        """A computation makes it."""
        if d in self.leaving or d in self.coming:
            raise self._wrong(step, f"makes {self._name(d)} while it is copied")

    def free(self, d: int, step: int) -> None:
        """It is freed without waiting for a copy."""
        if d in self.leaving or d in self.coming:
            raise self._wrong(step, f"frees {self._name(d)} while it is copied")

    def copy_out(self, d: int, step: int, there: bool) -> None:
        """A copy out begins. `there`: whether it is in memory."""
        if not there or d in self.coming:
            raise self._wrong(step, f"copies {self._name(d)} away, which is not in memory")
        if d in self.away:
            raise self._wrong(step, f"copies {self._name(d)} away a second time")
        if self.graph.producer[d] is None or d in self.pinned:
            raise self._wrong(step, f"copies {self._name(d)} away, which somebody else holds")
        self.leaving.add(d)
        self.away.add(d)
        self.bytes += self.graph.d[d].size

    def leave(self, d: int, step: int) -> None:
        """It is freed when its copy out has ended."""
        if d not in self.leaving:
            raise self._wrong(step, f"lets {self._name(d)} leave, which is not being copied away")
        self.leaving.discard(d)

    def copy_in(self, d: int, step: int, there: bool) -> None:
        """A copy back begins."""
        if d not in self.away or there:
            raise self._wrong(step, f"copies {self._name(d)} back, which is not away")
        self.coming.add(d)

    def _name(self, d: int) -> str:
        return self.graph.d[d].name

    @staticmethod
    def _wrong(step: int, why: str) -> ScheduleError:
        return ScheduleError(f"step {step}: {why}")
