"""Which computations of a schedule run by torch's own kernel, and not part by part.

Working on parts spares a tensor or two where memory is short and takes a little longer. Most of a
step is far below its peak: there, torch's own kernel may take what it likes.
"""

from __future__ import annotations

from collections.abc import Iterable

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, Schedule, Step, in_place_donor
from rkmate.ir.simulate import simulate


def choose_kernels(graph: CDGraph, schedule: Schedule, *, pinned: Iterable[int] = (),
                   reserve_at_loss: int = 0) -> Schedule:
    """The schedule with the unchunked kernel where it is no slower and leaves the peak as it is.

    Its choices do not touch one another: what such a kernel takes more is freed right after it.
    """
    if all(node.unchunked is None for node in graph.c):
        return schedule
    simulation = simulate(graph, schedule, pinned=pinned, reserve_at_loss=reserve_at_loss)
    steps: list[Step] = []
    for k, step in enumerate(schedule.steps):
        other = graph.c[step.c].unchunked if isinstance(step, Compute) else None
        if isinstance(step, Compute) and other is not None and not step.unchunked:
            node, donor = graph.c[step.c], in_place_donor(graph, schedule.steps, k)
            needed = simulation.timeline[k] - node.overhead + other.overhead \
                + (graph.d[donor].size if donor is not None else 0)
            if other.time <= node.time and needed <= simulation.peak:
                step = Compute(step.c, unchunked=True)
        steps.append(step)
    return Schedule(tuple(steps))


def seconds_to_save(graph: CDGraph) -> float:
    """How much faster a schedule that runs each backward computation once can get by its kernels: what
    bounds the time of such schedules without them bounds it with them when this is taken off."""
    return sum(max(0.0, node.time - node.unchunked.time) for node in graph.c if node.unchunked is not None)
