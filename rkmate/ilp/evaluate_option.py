"""Make an `Option` from an order of computations: the simulator determines its costs.

No number of the integer program reaches an option. The program only proposes orders.
"""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.ir import recompute
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Option
from rkmate.ir.schedule import Compute, Loss, from_order
from rkmate.ir.simulate import simulate


def evaluate_option(graph: CDGraph, backward: Sequence[int]) -> Option:
    """Return the option that runs every forward node once, then `backward`.

    Bytes and seconds are the simulator's. The bytes of the graph's outputs do not count as saved.
    The step of the loss itself belongs to neither phase: what the loss (or the next block)
    allocates is its own. Raises `ScheduleError` when the order is not executable.
    """
    loss = graph.loss
    schedule = from_order(graph, (*range(loss), *backward), loss)
    result = simulate(graph, schedule)
    at = next(k for k, step in enumerate(schedule.steps) if isinstance(step, Loss))
    first = next((k for k in range(at + 1, len(schedule.steps))
                  if isinstance(schedule.steps[k], Compute)), len(schedule.steps))
    external = set(graph.inputs) | set(graph.output_grads)
    forward_seconds = sum(graph.c[i].time for i in range(loss))
    return Option(
        forward=tuple(range(loss)),
        backward=tuple(backward),
        forward_seconds=forward_seconds,
        backward_seconds=sum(graph.c[i].time for i in backward),
        saved_bytes=result.saved - graph.bytes(set(graph.outputs) - external),
        forward_peak_bytes=max(result.timeline[:at], default=0),
        backward_peak_bytes=max(result.timeline[first:], default=0),
    )


def without_waste(graph: CDGraph, backward: Sequence[int]) -> tuple[int, ...]:
    """Return `backward` without the recomputations that nothing reads before they are made anew."""
    lean = recompute.without_waste(graph, (*graph.forward, *backward), graph.loss)
    return tuple(lean.order[lean.loss_at:])
