"""Simplification of the joint graph (Rockmate, appendix A.3), on a copy of the captured graph.

The rewritings of the table, one after the other; what nobody reads any more goes after each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.repairs import Rewrite
from rkmate.graph.passes.dead_code import drop_dead
from rkmate.graph.passes.joint import Joint, joint_of
from rkmate.graph.passes.table import REWRITES
from rkmate.graph.passes.verify import Verifier

VERIFY = False
"""Whether `simplify` verifies the graph after each pass, unless its caller says so. The tests set it; a
graph that breaks an invariant is a bug of a pass, and nothing that a user could do."""


def simplify(capture: Capture, wanted: tuple[bool, ...], choices: frozenset[str] = frozenset(), *,
             verify: bool | None = None) -> Joint:
    """The graph that is planned.

    `wanted`: per output, whether its gradient will come. `choices`: as of `Joint`. `verify`: whether to check
    the graph after each pass (None: as `VERIFY` says); raises `GraphError` that names the pass.
    """
    work = joint_of(capture, wanted, choices)
    rewrite(work, REWRITES, verify=VERIFY if verify is None else verify)
    return work.freeze()


def rewrite(work: Joint, passes: Sequence[Rewrite[Joint]], *, verify: bool = False) -> None:
    """Run those of some passes that apply to the graph, in order. Raises `GraphError` when asked to
    `verify`."""
    verifier = Verifier(work) if verify else None
    for each in passes:
        if each.applies(work.choices):
            each.run(work)
            drop_dead(work)
            if verifier is not None:
                verifier.check(work, each.name)
