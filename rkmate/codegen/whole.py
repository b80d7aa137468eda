"""Which operations that work part by part run whole instead: those that memory leaves room for.

Working on parts spares a tensor or two where memory is short and takes a little longer. Most of
a step is far below its peak: there, torch's own kernel may take what it likes.
"""

from __future__ import annotations

from collections.abc import Callable

from rkmate.graph.blocks.lower import Program
from rkmate.graph.passes.chunked_kernels import at_once
from rkmate.ir.schedule import Compute, Schedule
from rkmate.ir.simulate import Simulation


def whole_steps(program: Program, schedule: Schedule,
                simulate: Callable[[Schedule], Simulation]) -> frozenset[int]:
    """The steps of a schedule whose operation may run whole without raising the simulated peak."""
    calls = {i: at_once(node) for i, node in enumerate(program.operation)}
    more = {i: call.more for i, call in calls.items() if call is not None}
    if not more:
        return frozenset()
    simulation = simulate(schedule)
    return frozenset(
        k for k, step in enumerate(schedule.steps) if isinstance(step, Compute) and step.c in more
        and simulation.timeline[k] + more[step.c] <= simulation.peak)
