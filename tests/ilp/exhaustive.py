"""Every option of a small block, by trying all of them. Knows nothing of the integer program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rkmate.errors import ScheduleError
from rkmate.ilp.grid import evaluate_option, peak, seconds
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Option


def all_options(graph: CDGraph) -> Iterator[Option]:
    """Any forward nodes again before any backward node that reads forward data.

    What is saved, carried and dropped follows from the order, so the orders are all there is.
    """
    forward_data = {j for i in graph.forward for j in graph.c[i].outputs if graph.d[j].size}
    subsets = [s for n in range(graph.loss + 1)
               for s in itertools.combinations(graph.forward, n)]
    choices = [subsets if forward_data.intersection(graph.c[b].inputs) else [()]
               for b in graph.backward]
    for chosen in itertools.product(*choices):
        order = [i for again, b in zip(chosen, graph.backward, strict=True) for i in (*again, b)]
        try:
            yield evaluate_option(graph, order)
        except ScheduleError:
            continue   # reads what is not there


def fastest(options: list[Option], m_peak: int, m_save: int) -> float:
    """Seconds of the fastest within the budgets; infinite when there is none."""
    return min((seconds(o) for o in options if peak(o) <= m_peak and o.saved_bytes <= m_save),
               default=float("inf"))
