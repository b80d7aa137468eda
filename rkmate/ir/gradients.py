"""The memory of the backward's own data, which no choice of recomputations changes, and the least
memory of any schedule.

Backward nodes run once, in the graph's order, so a gradient lives from its producer (or the loss) to
its last reader, its release, or the end, whatever is recomputed in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.ir.cd import CDGraph


@dataclass(frozen=True)
class GradientMemory:
    """Bytes of gradients, per backward node, in order."""

    at_loss: int
    """Gradients that arrive at the loss and that somebody reads."""
    before: tuple[int, ...]
    """Gradients alive right before the node."""
    during: tuple[int, ...]
    """Gradients alive while it runs, its outputs included, its temporaries left out."""
    dying: tuple[frozenset[int], ...]
    """Gradients that leave memory right after it; outputs that nobody reads among them."""


def gradient_memory(graph: CDGraph) -> GradientMemory:
    """Return the memory of a graph's backward nodes."""
    ours = {j for j, made in enumerate(graph.producer)
            if (j in graph.output_grads if made is None else made >= graph.loss)
            and j not in graph.inputs}
    last: dict[int, int] = {}
    for b in graph.backward:
        for j in graph.c[b].inputs:
            last[j] = b
    for j, i in graph.releases.items():
        last[j] = max(last.get(j, -1), i)
    stay = set(graph.input_grads)
    leaving: dict[int, set[int]] = {}
    for j in ours - stay:
        made = graph.producer[j]
        end = last.get(j, made)
        if end is not None:         # an arriving gradient that nobody reads leaves at the loss
            leaving.setdefault(end, set()).add(j)
    at_loss = live = graph.bytes(j for j in graph.output_grads if j in ours and (j in last or j in stay))
    before: list[int] = []
    during: list[int] = []
    dying: list[frozenset[int]] = []
    for b in graph.backward:
        before.append(live)
        live += graph.bytes(j for j in graph.c[b].outputs if j in ours)
        during.append(live)
        gone = frozenset(leaving.get(b, ()))
        dying.append(gone)
        live -= graph.bytes(gone)
    return GradientMemory(at_loss, tuple(before), tuple(during), tuple(dying))


def least_memory(graph: CDGraph) -> int:
    """Return a lower bound, in bytes, of the peak of all schedules that run each backward computation once,
    in the graph's order, and send nothing away.

    While a backward computation runs, memory holds the gradients that are still read, the forward values that
    the computation reads, its results and its temporaries. A result may overwrite a gradient that dies there,
    or any forward value, because a schedule may drop a forward value there and make it anew.
    """
    held = frozenset(graph.held)
    forward = {j for c in graph.c[:graph.loss] for j in c.outputs} - held
    memory = gradient_memory(graph)
    # A held gradient that arrives at the loss is among the gradients.
    other = graph.bytes(held.difference(graph.output_grads))
    most = 0
    for b, alive, dying in zip(graph.backward, memory.during, memory.dying, strict=True):
        node = graph.c[b]
        place = max((graph.d[j].size for j in node.donors if j in forward or (j in dying and j not in held)),
                    default=0)
        read = graph.bytes(j for j in node.inputs if j in forward)
        most = max(most, other + alive + read + node.overhead - place)
    return most
