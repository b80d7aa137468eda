"""A schedule as Python source, what the run time has to know about it, and the functions that compute
deferred outputs from what the forward has kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rkmate.codegen.from_schedule import InEnvironment, LocalNames, Segment, listing_of
from rkmate.codegen.printer import print_listing
from rkmate.codegen.slices import Copy, Enter, Free, Function, Run, Slice
from rkmate.codegen.spelling import Spelled
from rkmate.graph.blocks.expressions import local_names, operators_of, source_key
from rkmate.graph.blocks.lower import lower
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.passes.joint import Deferred, Joint
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Schedule
from rkmate.support.planning_lock import gc_pause
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import NAMESPACE, record_of
from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.tensors import read_directly

# -- The module's source ---------------------------------------------------------------------------

_KNOWN = frozenset(("aten", "prims", NAMESPACE))


@dataclass(frozen=True)
class Generated:
    """Generated source. `forward` and the segments' functions take the environment of one step."""

    text: str
    slices: tuple[str, ...]
    """Functions that compute; the forward, the segments and the deferred outputs' functions call them."""
    segments: tuple[Segment, ...]
    """Stretches of the backward, in its order."""
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
    """Names of the random operations that run several times, in order, in forward and backward."""
    copies: bool = False
    """Whether something is copied away."""


@gc_pause()
@read_directly()
def emit(partition: Partition, schedule: Schedule, labels: Sequence[str] | None = None,
         summary: str = "", graph: CDGraph | None = None) -> Generated:
    """Return the source of a schedule that the simulator has accepted. Arguments as for `listing_of`."""
    listing, segments = listing_of(partition, schedule, labels, summary, graph)
    later = tuple(function_of(d, f"output_{d.output}") for d in partition.program.joint.deferred)
    for part in (listing.functions, *((f,) for f in later)):       # each has an environment of its own
        replace(listing, functions=part).verify()
    listing = replace(listing, functions=(*listing.functions, *later))
    operators = _operators(partition)
    known = _KNOWN.issuperset(o.namespace for o in operators)
    own = [r for o in operators if (r := record_of(o)) is not None]
    printed = print_listing(listing)
    return Generated(printed.text, printed.slices, segments,
                     tuple(int(s.key) for s, _ in partition.program.input_grads),
                     tuple(f.name for f in later), known and not any(r.uses_autograd for r in own),
                     known and not any(r.reads_host for r in own),
                     (_draws(listing.functions[:1]), _draws(listing.functions[1:1 + len(segments)])),
                     any(isinstance(s, Copy) for f in listing.functions for s in f.body))


def _operators(partition: Partition) -> set[OpOverload]:
    """Return all operators, including those in tiles and groups, and of deferred outputs."""
    joint = partition.program.joint
    graphs = (joint.graph, *(d.graph for d in joint.deferred))
    return {o for graph in graphs for node in graph.nodes for o in operators_of(node)}


def _draws(functions: Sequence[Function]) -> tuple[str, ...]:
    return tuple(call.rng[step.state] for f in functions for call in f.body if isinstance(call, Enter)
                 for step in call.slice.body if isinstance(step, Run) and step.state is not None)


# -- Deferred outputs ------------------------------------------------------------------------------

def function_of(deferred: Deferred, name: str) -> Function:
    """Return the function of one output: operations as a plain forward has them, each once."""
    program = lower(Joint(deferred.graph, deferred.sources, (deferred.result,), wanted=(False,)))
    cd, result = program.cd, program.storage[deferred.result]
    naming = LocalNames()
    naming.local = local_names(program, None, tuple(range(len(cd.c))), naming.table)
    expressions = Spelled(program, naming)
    last = {j: i for i, c in enumerate(cd.c) for j in (*c.inputs, *c.outputs)}
    body: list[Run | Free] = []
    for i, node in enumerate(program.operation):
        several = isinstance(node.meta[VALUE], (tuple, list))
        makes: list[str | None] = [None] * (len(node.meta[VALUE]) if several else 1)
        for j in cd.c[i].outputs:
            makes[program.position[j] or 0] = naming.local[j]
        body.append(Run(expressions.call(node), tuple(makes), several))
        gone = [j for j in last if last[j] == i and j != result]
        if gone:
            body.append(Free(tuple(naming.local[j] for j in gone), sum(cd.d[j].size for j in gone)))
    assert isinstance(result, int)
    key = cd.d[result].name
    part = Slice(f"{name}_values", (), (), tuple(naming.sources.values()), tuple(body),
                 (naming.local[result],))
    return Function(name, f"output {deferred.output}, when it is read",
                    (Enter(part, (), (), tuple(map(source_key, naming.sources)), (key,), ()),),
                    (Spelled(program, InEnvironment(cd, (result,))).value(deferred.result),),
                    (key,))
