"""Simplification of the joint graph (Rockmate, appendix A.3), on a copy of the captured graph.

The rewritings of the table, one after the other; what nobody reads any more goes after each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.repairs import Rewrite
from rkmate.graph.passes.dead_code import drop_dead
from rkmate.graph.passes.joint import Choices, Joint, Rewriting, is_backward, is_random, is_view, rewriting
from rkmate.graph.passes.table import REWRITES
from rkmate.graph.passes.verify import Verifier

VERIFY = False
"""Whether `simplify` verifies the graph after each pass, unless its caller says so. The tests set it; a
graph that breaks an invariant is a bug of a pass, and nothing that a user could do."""


def simplify(capture: Capture, wanted: tuple[bool, ...], choices: Choices = Choices(), *,
             verify: bool | None = None) -> Joint:
    """The graph that is planned.

    `wanted`: per output, whether its gradient will come. `verify`: whether to check the graph after each pass
    (None: as `VERIFY` says); raises `GraphError` that names the pass.
    """
    work = rewriting(capture, wanted, choices)
    rewrite(work, REWRITES, verify=VERIFY if verify is None else verify)
    return work.joint()


def rewrite(work: Rewriting, passes: Sequence[Rewrite[Rewriting]], *, verify: bool = False) -> None:
    """Run rewriting passes in order. Raises `GraphError` when asked to `verify`."""
    verifier = Verifier(work.joint()) if verify else None
    for each in passes:
        each.run(work)
        drop_dead(work)
        if verifier is not None:
            verifier.check(work.joint(), each.name)


__all__ = ["VERIFY", "Choices", "Joint", "is_backward", "is_random", "is_view", "rewrite", "simplify"]
