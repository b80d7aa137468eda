"""Calls of one module whose backward has not come: what they hold stands beside the next call's plan."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

from rkmate.ir.schedule import Loss
from rkmate.ir.several_calls import peak_of_calls
from rkmate.ir.simulate import simulate
from rkmate.runtime.segments import Call
from rkmate.show.plan import Plan
from rkmate.support.warn import warn


class OpenCalls:
    """Knows the open calls of one module by weak references: those whose outputs are gone do not count."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[Call]] = []
        self._lock = threading.Lock()
        self._looked: set[tuple[str, int, bool]] = set()
        """Plans and numbers of calls, before a forward and a backward, that need no second look."""
        self._told: set[int] = set()

    def now(self) -> list[Call]:
        """The calls that are open."""
        with self._lock:
            found = [call for r in self._calls if (call := r()) is not None and call.is_open]
            self._calls = [weakref.ref(call) for call in found]
        return found

    def add(self, call: Call, plan: Plan) -> None:
        """A forward that has run, and the plan that it follows."""
        with self._lock:
            self._calls.append(weakref.ref(call))
        call.begins = partial(self.check, plan)

    def check(self, plan: Plan, *, forward: bool = False) -> None:
        """Before a forward, or a backward: warn where the other calls hold so much that what follows is
        over the budget. Said once for each number of calls."""
        others = 0 if forward else 1
        key = plan.fingerprint, len(self.now()) - others + 1, forward
        if key[1] <= plan.calls or key in self._looked or key[1] in self._told:
            return
        gc.collect()                    # outputs that are gone but for a circle of references
        opened = self.now()
        calls = len(opened) - others + 1
        if calls <= plan.calls or calls in self._told:
            return
        self._looked.add((plan.fingerprint, calls, forward))
        graph = plan.graph
        held = sum(call.env.held() for call in opened)
        together = peak_of_calls(graph.cd, plan.schedule, calls, pinned=graph.pinned,
                                 reserve_at_loss=graph.reserve_at_loss)
        if (held + _of_forward(plan) if forward else together) <= plan.budget_bytes:
            return
        self._told.add(calls)
        planned = "one call" if plan.calls == 1 else f"{plan.calls} calls"
        warn(f"{calls} calls of this module before a backward: the step takes about {together:,} bytes "
             f"({held:,} are held now), and the budget of {plan.budget_bytes:,} bytes was planned for "
             f"{planned}. rkmate.wrap(..., calls={calls}) plans for all of them. Where no backward will "
             "come, drop the outputs, or call the module under torch.no_grad()")


def _of_forward(plan: Plan) -> int:
    """The peak of a forward alone, in bytes."""
    graph, steps = plan.graph, plan.schedule.steps
    levels = simulate(graph.cd, plan.schedule, pinned=graph.pinned).timeline
    return max(levels[:steps.index(Loss())], default=0)
