"""Memory that no schedule does without, whatever operations take beside what they read and make."""

from __future__ import annotations

from collections.abc import Iterable

from rkmate.ir.cd import CDGraph
from rkmate.ir.gradients import gradient_memory


def least_memory(graph: CDGraph, pinned: Iterable[int] = ()) -> int:
    """Bytes that every schedule takes at least that runs each backward computation once, in the graph's
    order, and sends nothing away. `pinned`: D nodes that the user holds.

    While a backward computation runs, there are the gradients that are still read, what it reads of the
    forward, its results and its temporaries. A result takes the place of a gradient that dies there, or of
    any forward value, as a schedule may drop one there that it makes anew.
    """
    held = frozenset(pinned)
    forward = {j for c in graph.c[:graph.loss] for j in c.outputs} - held
    memory = gradient_memory(graph)
    # A pinned gradient that arrives at the loss is among the gradients.
    beside = graph.bytes(held.difference(graph.output_grads))
    most = 0
    for b, alive, dying in zip(graph.backward, memory.during, memory.dying, strict=True):
        node = graph.c[b]
        place = max((graph.d[j].size for j in node.donors if j in forward or (j in dying and j not in held)),
                    default=0)
        read = graph.bytes(j for j in node.inputs if j in forward)
        most = max(most, beside + alive + read + node.overhead - place)
    return most
