"""Choose the kernel of each computation of a schedule: in small parts, in larger parts, or at once; by one
library or another.

Working on small parts spares memory where it is short and takes longer. Most of a step is far below its
peak: there, a faster kernel may take what it likes.
"""

from __future__ import annotations

from rkmate.ir.cd import CDGraph, CNode
from rkmate.ir.schedule import Compute, Schedule, Step, in_place_donor, kernel_of
from rkmate.ir.simulate import Simulation, simulate


def choose_kernels(graph: CDGraph, schedule: Schedule, *, room: int = 0,
                   known: Simulation | None = None) -> Schedule:
    """Return the schedule with, at each step, the fastest kernel that leaves the peak as it is, or within
    `room` bytes where that is more. `known`: the simulator's verdict on it, where it was asked for already.

    Its choices do not touch one another: what such a kernel takes more is freed right after it. A step that
    has another kernel than its computation's own keeps it.
    """
    if not any(node.alternatives for node in graph.c):
        return schedule
    simulation = known or simulate(graph, schedule)
    most = max(simulation.peak, room)
    steps: list[Step] = []
    for k, step in enumerate(schedule.steps):
        if isinstance(step, Compute) and graph.c[step.c].alternatives and not step.kernel:
            node, donor = graph.c[step.c], in_place_donor(graph, schedule.steps, k)
            beside = simulation.timeline[k] - node.overhead + (0 if donor is None else graph.d[donor].size)
            # Its own only where it is the fastest alone.
            _, _, kernel = min([(node.time, 0, 0), *(
                (other.time, -1, n) for n, other in enumerate(node.alternatives, 1)
                if beside + other.overhead <= most)])
            step = Compute(step.c, kernel)
        steps.append(step)
    return Schedule(tuple(steps))


def by_own_kernels(schedule: Schedule) -> Schedule:
    """Return the schedule with each computation's own kernel."""
    return Schedule(tuple(Compute(s.c) if isinstance(s, Compute) else s for s in schedule.steps))


def seconds_to_gain(graph: CDGraph, schedule: Schedule) -> float:
    """Return how many seconds faster a schedule would be if each computation ran by its fastest kernel."""
    return sum(kernel_of(graph, s).time - fastest(graph.c[s.c])
               for s in schedule.steps if isinstance(s, Compute) and graph.c[s.c].alternatives)


def seconds_to_save(graph: CDGraph) -> float:
    """Return how many seconds the first runs of all computations can gain by their kernels. Subtract this
    number from a time bound for schedules whose first runs use their own kernels, and the bound holds with
    all kernels."""
    return sum(node.time - fastest(node) for node in graph.c)


def fastest(node: CNode) -> float:
    """Return seconds of a computation's fastest kernel."""
    return min((node.time, *(other.time for other in node.alternatives)))
