"""The functions that compute deferred outputs from what the forward has kept."""

from __future__ import annotations

from collections.abc import Mapping

from rkmate.codegen.from_schedule import InEnvironment, LocalNames
from rkmate.codegen.slices import Call, Free, Function, Run, Slice
from rkmate.codegen.spelling import Spelled
from rkmate.graph.blocks.expressions import local_names, source_key
from rkmate.graph.blocks.lower import lower
from rkmate.graph.passes.functions import OwnFunction
from rkmate.graph.passes.joint import Deferred, Joint
from rkmate.torch_seam.nodes import VALUE


def function_of(deferred: Deferred, name: str, aliases: Mapping[str, str]) -> Function:
    """The function of one output: operations as a plain forward has them, each once. `aliases`: of the
    namespaces of operators."""
    program = lower(Joint(deferred.graph, deferred.sources, (deferred.result,), wanted=(False,)))
    cd, result = program.cd, program.storage[deferred.result]
    naming = _Names(aliases)
    naming.local = local_names(program, None, tuple(range(len(cd.c))), naming.table)
    expressions = Spelled(program, naming)
    last = {j: i for i, c in enumerate(cd.c) for j in (*c.inputs, *c.outputs)}
    body: list[Run | Free] = []
    for i, node in enumerate(program.operation):
        naming.used.clear()
        call = expressions.call(node)
        several = isinstance(node.meta[VALUE], (tuple, list))
        makes: list[str | None] = [None] * (len(node.meta[VALUE]) if several else 1)
        for j in cd.c[i].outputs:
            makes[program.position[j] or 0] = naming.local[j]
        body.append(Run(call, tuple(naming.used), tuple(makes), several))
        gone = [j for j in last if last[j] == i and j != result]
        if gone:
            body.append(Free(tuple(naming.local[j] for j in gone), sum(cd.d[j].size for j in gone)))
    assert isinstance(result, int)
    key = cd.d[result].name
    part = Slice(f"{name}_values", (), (), tuple(naming.sources.values()), tuple(body),
                 (naming.local[result],))
    return Function(name, f"output {deferred.output}, when it is read",
                    (Call(part, (), (), tuple(map(source_key, naming.sources)), (key,), ()),),
                    (Spelled(program, InEnvironment(cd, aliases, (result,))).value(deferred.result),),
                    (key,))


class _Names(LocalNames):
    """Names inside the function."""

    local: dict[int, str]

    def value(self, j: int) -> str:
        self.used[self.local[j]] = None
        return self.local[j]

    def function(self, tiled: OwnFunction) -> str:
        raise AssertionError("what is computed when it is read is computed whole")
