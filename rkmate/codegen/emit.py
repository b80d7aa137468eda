"""A schedule as Python source, and what the run time has to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rkmate.codegen.from_schedule import Segment, listing_of
from rkmate.codegen.printer import print_listing
from rkmate.graph.blocks.partition import Partition
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Schedule
from rkmate.support.gc_pause import gc_pause


@dataclass(frozen=True)
class Generated:
    """Generated source. `forward` and the segments' functions take the environment of one step."""

    text: str
    segments: tuple[Segment, ...]
    """In the order of the backward."""
    input_grads: tuple[int, ...]
    """Inputs (tensor numbers) whose gradients the last segment returns."""


@gc_pause()
def emit(partition: Partition, schedule: Schedule, labels: Sequence[str] | None = None,
         summary: str = "", graph: CDGraph | None = None) -> Generated:
    """The source of a schedule that the simulator has accepted; arguments as of `listing_of`."""
    listing, segments = listing_of(partition, schedule, labels, summary, graph)
    return Generated(print_listing(listing.verify()), segments,
                     tuple(int(s.key) for s, _ in partition.program.input_grads))
