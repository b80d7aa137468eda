"""The functions that compute deferred outputs from what the forward has kept."""

from __future__ import annotations

from rkmate.codegen.from_schedule import InEnvironment, LocalNames
from rkmate.codegen.slices import Enter, Free, Function, Run, Slice
from rkmate.codegen.spelling import Spelled
from rkmate.graph.blocks.expressions import local_names, source_key
from rkmate.graph.blocks.lower import lower
from rkmate.graph.passes.joint import Deferred, Joint
from rkmate.torch_seam.nodes import VALUE


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
