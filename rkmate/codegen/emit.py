"""A schedule as Python source, and what the run time has to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.codegen.deferred import function_of
from rkmate.codegen.from_schedule import Segment, listing_of
from rkmate.codegen.printer import print_listing
from rkmate.codegen.slices import Call, Copy, Function, Run
from rkmate.graph.blocks.partition import Partition
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Schedule
from rkmate.support.planning_lock import gc_pause
from rkmate.torch_seam.own import NAMESPACE, record_of
from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.tensors import read_directly

_KNOWN = frozenset(("aten", "prims", NAMESPACE))


@dataclass(frozen=True)
class Generated:
    """Generated source. `forward` and the segments' functions take the environment of one step."""

    text: str
    segments: tuple[Segment, ...]
    """In the order of the backward."""
    input_grads: tuple[int, ...]
    """Inputs (tensor numbers) whose gradients the last segment returns."""
    deferred: tuple[str, ...] = ()
    """Functions of the outputs that are computed when they are read, in the order of `Joint.deferred`. They
    take an environment of their own."""
    below_autograd: bool = False
    """Whether all operations are torch's own, or this package's that use no autograd inside."""
    only_known: bool = False
    """Whether all are torch's own, or this package's that read no values on the host."""
    draws: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Of the forward and of the backward: the random operations that run several times, by name, in order."""
    copies: bool = False
    """Whether something is copied away."""


@gc_pause()
@read_directly()
def emit(partition: Partition, schedule: Schedule, labels: Sequence[str] | None = None,
         summary: str = "", graph: CDGraph | None = None) -> Generated:
    """The source of a schedule that the simulator has accepted; arguments as of `listing_of`."""
    listing, segments = listing_of(partition, schedule, labels, summary, graph)
    aliases = {space: alias for alias, space in listing.namespaces.items()}
    later = tuple(function_of(d, f"output_{d.output}", aliases) for d in partition.program.joint.deferred)
    for part in (listing.functions, *((f,) for f in later)):       # each has an environment of its own
        replace(listing, functions=part).verify()
    listing = replace(listing, functions=(*listing.functions, *later))
    known = _KNOWN.issuperset(listing.namespaces.values())
    own = [r for o in _operators(partition) if (r := record_of(o)) is not None]
    return Generated(print_listing(listing), segments,
                     tuple(int(s.key) for s, _ in partition.program.input_grads),
                     tuple(f.name for f in later), known and not any(r.uses_autograd for r in own),
                     known and not any(r.reads_host for r in own),
                     (_draws(listing.functions[:1]), _draws(listing.functions[1:1 + len(segments)])),
                     any(isinstance(s, Copy) for f in listing.functions for s in f.body))


def _operators(partition: Partition) -> set[OpOverload]:
    """All operators, those in tiles and groups included."""
    found: set[OpOverload] = set()
    for node in partition.program.operation:
        inside = getattr(node.target, "graph", None)
        for n in (node, *(inside.nodes if inside is not None else ())):
            if isinstance(n.target, OpOverload):
                found.add(n.target)
    return found


def _draws(functions: Sequence[Function]) -> tuple[str, ...]:
    return tuple(call.rng[step.state] for f in functions for call in f.body if isinstance(call, Call)
                 for step in call.slice.body if isinstance(step, Run) and step.state is not None)
